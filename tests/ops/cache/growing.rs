//! Caches that get more room while they are in use.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, Tokens};
use wgpu_attention::{Attention, Cache, CacheConfig, Config, Error, Forward, Scratch};

use super::{STORAGES, view};
use crate::harness::{Ask, Bed, Count, Data, FORMS, Kind, Report, Rng, Rules, defaults, due, full, rest};
use crate::laws::property::seed;

const LAYOUTS: [(CacheLayout, usize); 2] =
    [(CacheLayout::Contiguous, 8), (CacheLayout::Paged { page: 16, pages: 3 }, 20)];

/// Returns the same kind with more room: twice the capacity, or some pages, or both.
fn larger(kind: &Kind, rng: &mut Rng) -> Kind {
    let layout = match kind.layout {
        CacheLayout::Paged { page, pages } => CacheLayout::Paged { page, pages: pages + 1 + rng.below(4) },
        other => other,
    };
    let more = !matches!(layout, CacheLayout::Paged { .. }) || rng.chance(0.7);
    Kind { capacity: if more { 2 * kind.capacity } else { kind.capacity }, layout, ..*kind }
}

/// Random calls against lists on the host. The cache grows when it is full, with shared pages and
/// with changes that are not recorded yet.
#[test]
fn random_calls_match_model() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, growing");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let key = format!("growing, {storage:?}, {layout:?}");
            if !(due(&key) || rest(&key)) {
                continue;
            }
            let compacts = (s + l).is_multiple_of(2);
            let kind = Kind { batch: 3, layers: 2, compacts, ..Kind::new(storage, layout, capacity) };
            let profile = [full(), defaults()][s % 2];
            let mut bed = Bed::new(profile, kind, Data::Lossless, seed() + s as u64);
            let mut rng = Rng::new(seed() + 5);
            let mut grown = 0;
            for step in 0..40 {
                let mut run = |bed: &mut Bed| -> Result<f64, String> {
                    let refused = |e: Error| format!("refused: {e}");
                    let n = rng.below(3);
                    match rng.below(6) {
                        0 => bed.reorder(&[rng.below(3), rng.below(3), rng.below(3)]).map_err(refused)?,
                        1 if matches!(layout, CacheLayout::Paged { .. }) => {
                            bed.fork(n, rng.below(3)).map_err(refused)?;
                        }
                        2 => {
                            let to = bed.sequences[n].len().saturating_sub(rng.below(4));
                            bed.sequences[n].return_to(&kind, to);
                            bed.cache.truncate(n, to).map_err(refused)?;
                        }
                        _ => {}
                    }
                    let counts: Vec<_> = (0..3).map(|_| rng.below(7)).collect();
                    while let Err(e) = bed.grow(&Count::Each(counts.clone())) {
                        if !matches!(e, Error::CacheFull { .. } | Error::OutOfPages { .. }) {
                            return Err(refused(e));
                        }
                        let to = larger(&bed.kind, &mut rng);
                        let mut encoder = bed.encoder();
                        bed.cache.grow(&mut encoder, to.config()).map_err(refused)?;
                        bed.submit(encoder);
                        bed.kind = to;
                        grown += 1;
                        bed.check_sequence_table()?;
                    }
                    let rules = Rules { causal: step % 2 == 0, ..Default::default() };
                    bed.ask(&Ask {
                        layer: step % 2,
                        rows: Some(1 + step % 3),
                        ..Ask::new(FORMS[step / 7 % 2], &rules)
                    })
                };
                let outcome = run(&mut bed);
                let failed = outcome.is_err();
                report.record(&format!("{kind:?}, step {step}"), &profile.name, outcome);
                if failed {
                    break;
                }
            }
            assert!(grown > 1, "{kind:?}: {grown}");
            (0..3).for_each(|s| bed.cache.clear(s).expect("a sequence"));
            if let CacheLayout::Paged { pages, .. } = bed.kind.layout {
                assert_eq!(bed.cache.free_pages(), pages);
            }
        }
    }
    report.finish();
}

/// A call before the growth reads the old buffers, and a call after it the new ones. Both are in
/// one encoder, and both have the same bits.
#[test]
fn recorded_calls_keep_old_buffers() {
    let gpu = &full().gpu;
    let (heads, dim, rows) = (4, 16, 9);
    let mut rng = Rng::named("growing in one encoder");
    let upload = |x: Vec<f32>| gpu.upload(&x).expect("an upload");
    let [k, v] = [0, 1].map(|_| upload(rng.normals(heads * rows * dim)));
    let q = upload(rng.normals(heads * dim));
    let outs = [0, 1].map(|_| gpu.buffer(4 * heads * dim).expect("a buffer"));
    for latent in [false, true] {
        let kv_heads = if latent { 1 } else { heads };
        let config = CacheConfig::new(kv_heads, dim, rows).latent(latent);
        let operator = Config::new(heads, dim).kv_heads(kv_heads);
        let attention = Attention::with_pipelines(gpu.pipelines(), operator).expect("an operator");
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let before = cache.bytes();
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::All(rows))?;
            let [k, v] = [&k, &v].map(|x| view(x, kv_heads, rows, dim));
            cache.append(encoder, 0, &if latent { Append::latent(k) } else { Append::new(k, v) })?;
            for (n, out) in outs.iter().enumerate() {
                let call =
                    Forward::with_cache(view(&q, heads, 1, dim), &cache, view(out, heads, 1, dim)).at_end();
                scratch.ensure(gpu.device(), attention.scratch_size(&call)?)?;
                attention.forward(encoder, &call, &mut scratch)?;
                if n == 0 {
                    cache.grow(encoder, cache.config().capacity(5 * rows))?;
                }
            }
            Ok(())
        })
        .expect("a step");
        let [old, new] =
            outs.each_ref().map(|out| gpu.download::<f32>(out, heads * dim).expect("a read-back"));
        assert!(old == new && old.iter().any(|x| *x != 0.0), "{latent}: {old:?} {new:?}");
        assert_eq!(cache.config().token_capacity(), 5 * rows);
        // Rows of keys and of values, and the sequence table, which does not grow.
        let sides = if latent { 1 } else { 2 };
        assert_eq!(cache.bytes() - before, (sides * 4 * kv_heads * dim * 4 * rows) as u64, "{latent}");
        assert_eq!(cache.len(0), Some(rows));
    }
}

/// Wrong growth has clear errors and changes nothing.
#[test]
fn wrong_growth_is_refused() {
    let gpu = &full().gpu;
    let paged = |page, pages| CacheLayout::Paged { page, pages };
    let config = CacheConfig::new(2, 8, 20).batch(2);
    let ring = config.layout(CacheLayout::Ring { sink_tokens: 2 });
    let pages = config.layout(paged(16, 4));
    let option = |e: &Error| matches!(e, Error::Option { option: "capacity" | "pages", .. });
    let unsupported = |e: &Error| matches!(e, Error::Unsupported { .. });
    let binding = |e: &Error| matches!(e, Error::CacheBindingLimit { .. });
    type Is = fn(&Error) -> bool;
    let cases: [(CacheConfig, CacheConfig, Is); 8] = [
        (config, config.capacity(19), option),
        (config, config.capacity(0), option),
        (config, config.capacity(1 << 26), binding),
        (config, config.capacity(40).batch(3), unsupported),
        (config, config.capacity(40).storage(CacheStorage::F16), unsupported),
        (ring, ring.capacity(40), unsupported),
        (pages, pages.layout(paged(16, 3)), option),
        (pages, pages.layout(paged(32, 4)), unsupported),
    ];
    for (from, to, is) in cases {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), from).expect("a cache");
        let bytes = cache.bytes();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let got = cache.grow(&mut encoder, to);
        assert!(got.as_ref().is_err_and(is), "{from:?} {to:?}: {got:?}");
        assert_eq!((cache.bytes(), *cache.config()), (bytes, from));
    }
}
