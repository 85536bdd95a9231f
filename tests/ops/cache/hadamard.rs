//! Caches that store products with a Walsh–Hadamard matrix, and ggml's formats.

use wgpu_attention::cache::{Append, Cache, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::reference::cache::{hadamard, stored};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::{
    Attention, CacheConfig, Config, DType, Error, Forward, KernelOptions, Mask, Scratch, Shape, TensorView,
};

use super::{LAYOUTS, STORAGES, usual};
use crate::harness::{Ask, Bed, Count, Data, FORMS, Kind, Places, Report, Rules, Vector, due, full, rest};

pub const FAMILY: &str = "rotated_cache";
pub const NAMES: &[&str] = &[
    "rotated_q4",
    "rotated_q4_blocks64_d128",
    "rotated_q4_grid",
    "rotated_q4_outliers",
    "rotated_q4_ties",
    "rotated_q8",
    "rotated_q8_blocks32",
    "rotated_q8_grouped",
];

/// The numbers that a vector stores, after the product.
fn numbers(vector: &Vector, side: &str) -> Vec<f32> {
    let levels = vector.f64(&format!("{side}_quant"));
    let scales = vector.f64(&format!("{side}_scale"));
    levels.iter().enumerate().map(|(n, level)| (level * scales[n / 32]) as f32).collect()
}

/// The reference and the device store the vectors' integers. Attention gives the vectors' results.
#[test]
fn results_match_vectors() {
    let mut report = Report::new("caches with a Walsh–Hadamard product, vectors");
    let gpu = &full().gpu;
    for (n, name) in NAMES.iter().enumerate() {
        let vector = Vector::load(FAMILY, name);
        let [batch, heads, q_len, head_dim] = vector.shape4("q");
        let [_, kv_heads, kv_len, _] = vector.shape4("k");
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: head_dim };
        let block = vector.size("hadamard");
        let storage = if vector.size("bits") == 4 { CacheStorage::Q4_0 } else { CacheStorage::Q8_0 };
        let sides = ["k", "v"].map(|side| (vector.f32(side), numbers(&vector, side)));
        for (given, want) in &sides {
            let got: Vec<f32> =
                given.chunks(head_dim).flat_map(|row| stored(storage, &hadamard(row, block))).collect();
            assert_eq!(got, *want, "{name}, reference");
        }
        for (m, form) in FORMS.into_iter().enumerate() {
            if n % 2 != m && !rest(&format!("{name}, {form:?}")) {
                continue;
            }
            let run = || -> Result<f64, String> {
                let refused = |e: Error| e.to_string();
                let [k, v] = [0, 1].map(|side| gpu.upload(&sides[side].0).expect("an upload"));
                let rotated: Vec<f32> = sides
                    .iter()
                    .flat_map(|(given, _)| given.chunks(head_dim).flat_map(|row| hadamard(row, block)))
                    .collect();
                let (rotated, q) = (
                    gpu.upload(&rotated).expect("an upload"),
                    gpu.upload(&vector.f32("q")).expect("an upload"),
                );
                let [out, lse, read] = [1, 1, 2].map(|n| {
                    gpu.buffer(4 * n * (rotated.size() as usize).max(q.size() as usize)).expect("a buffer")
                });
                let f32 = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
                let config = CacheConfig::new(kv_heads, head_dim, kv_len).batch(batch).storage(storage);
                let pipelines = gpu.pipelines();
                let mut cache = Cache::with_pipelines(pipelines, config.hadamard(block)).map_err(refused)?;
                let mut plain = Cache::with_pipelines(pipelines, config).map_err(refused)?;
                let options = KernelOptions::new().target(form);
                let attention = Config::of(&shape).scale(vector.number("scale")).kernel_options(options);
                let attention = Attention::with_pipelines(pipelines, attention).map_err(refused)?;
                let call = Forward::with_cache(f32(&q, shape.q()), &cache, f32(&out, shape.out())).at_end();
                let size = attention.scratch_size(&call).map_err(refused)?;
                let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
                let rows = [0, 1].map(|side| f32(&rotated, shape.k()).with_offset(side * sides[0].0.len()));
                let read_at = [0, 1].map(|side| f32(&read, shape.k()).with_offset(side * sides[0].0.len()));
                gpu.submit(|encoder| {
                    cache.advance(encoder, Tokens::All(kv_len))?;
                    cache.append(encoder, 0, &Append::new(f32(&k, shape.k()), f32(&v, shape.v())))?;
                    let call = Forward::with_cache(f32(&q, shape.q()), &cache, f32(&out, shape.out()));
                    let call = call.at_end().mask(Mask::causal()).lse(f32(&lse, shape.lse()));
                    attention.forward(encoder, &call, &mut scratch)?;
                    plain.advance(encoder, Tokens::All(kv_len))?;
                    plain.append(encoder, 0, &Append::new(rows[0], rows[1]))?;
                    plain.read(encoder, 0, &CacheRead::new(read_at[0], read_at[1]))
                })
                .map_err(refused)?;
                let want = [&sides[0].1[..], &sides[1].1].concat();
                let got = gpu.download::<f32>(&read, want.len()).map_err(refused)?;
                if got != want {
                    return Err("the stored numbers differ".into());
                }
                let mut worst = 0f64;
                for (tensor, buffer) in [("out", &out), ("lse", &lse)] {
                    let (want, tolerance) = vector.expected(tensor).expect("in the vector");
                    let got = gpu.download::<f32>(buffer, want.len()).map_err(refused)?;
                    let got: Vec<f64> = got.into_iter().map(f64::from).collect();
                    let difference = compare(&got, &want, tolerance).map_err(|e| format!("{tensor}: {e}"))?;
                    worst = worst.max(difference.absolute / tolerance.absolute);
                }
                // The product is undone: the numbers of the vector come back, times the matrix.
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                cache.read(&mut encoder, 0, &CacheRead::new(read_at[0], read_at[1])).map_err(refused)?;
                gpu.queue().submit([encoder.finish()]);
                let got = gpu.download::<f32>(&read, want.len()).map_err(refused)?;
                let back: Vec<f32> = want.chunks(head_dim).flat_map(|row| hadamard(row, block)).collect();
                let most = back.iter().fold(0f32, |most, x| most.max(x.abs()));
                if got.iter().zip(&back).any(|(a, b)| (a - b).abs() > 1e-6 * most) {
                    return Err("the product is not undone".into());
                }
                Ok(worst)
            };
            report.record(name, &format!("{form:?}"), run());
        }
    }
    report.finish();
}

/// Every storage and layout: tokens by steps, rows read back and overwritten.
#[test]
fn storages_and_layouts_match_model() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches with a Walsh–Hadamard product");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let (usual, splits) = usual(s, l);
            for form in FORMS {
                let key = format!("hadamard, {storage:?}, {layout:?}");
                if !(form == usual && due(&key) || rest(&key)) {
                    continue;
                }
                let block = [32, 64][(s + l) % 2];
                let kind = Kind {
                    head_dim: 128,
                    value_dim: 64,
                    hadamard: Some(block),
                    ..Kind::new(storage, layout, capacity)
                };
                let mut bed = Bed::new(full(), kind, Data::Random, 17 + s as u64);
                let rules = Rules { causal: true, ..Default::default() };
                let dtype = [DType::F32, DType::F16, DType::BF16][(s + l) % 3];
                let ask = Ask { splits, dtype, ..Ask::new(form, &rules) };
                for (n, rows) in [5, 1, 1, 20, 1, 7].into_iter().enumerate() {
                    let grown = bed.grow(&Count::All(rows)).map_err(|e| format!("refused: {e}"));
                    let outcome = grown.and_then(|()| {
                        let worst = bed.ask(&ask)?;
                        if n % 3 < 2 {
                            return Ok(worst);
                        }
                        let at = Places::Start(0);
                        bed.overwrite(0, &at, 3).map_err(|e| format!("refused: {e}"))?;
                        let read = bed.read(0, &at, 9, DType::F32, crate::harness::Layout::Dense)?;
                        Ok(worst.max(read).max(bed.ask(&ask)?))
                    });
                    report.record(
                        &format!("{kind:?}, {rows} rows"),
                        &format!("{form:?}, {dtype:?}"),
                        outcome,
                    );
                }
            }
        }
    }
    report.finish();
}

/// Large channels: with the product, 4 bits lose less of the rest of the row.
#[test]
fn outliers_cost_less() {
    let rows: Vec<Vec<f32>> = (0..64).map(|n| crate::harness::Rng::new(n).normals(64)).collect();
    let error = |block: usize, storage| -> f64 {
        let rows = rows.iter().map(|row| {
            let row: Vec<f32> =
                row.iter().enumerate().map(|(d, x)| if d == 5 { x * 40.0 } else { *x }).collect();
            let kept = if block > 1 {
                hadamard(&stored(storage, &hadamard(&row, block)), block)
            } else {
                stored(storage, &row)
            };
            row.iter().zip(kept).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
        });
        rows.sum()
    };
    for storage in [CacheStorage::Q4_0, CacheStorage::Q4(ScaleGroup::Of(32))] {
        let (plain, rotated) = (error(1, storage), error(64, storage));
        assert!(rotated < 0.6 * plain, "{storage:?}: {rotated} and {plain}");
    }
}

/// Blocks that do not divide the channels.
#[test]
fn wrong_blocks_are_refused() {
    let pipelines = full().gpu.pipelines();
    let config = CacheConfig::new(2, 128, 64).value_dim(64);
    for block in [0, 1, 16, 48, 96, 128, usize::MAX] {
        let got = Cache::with_pipelines(pipelines, config.hadamard(block)).map(drop);
        assert!(matches!(got, Err(Error::Option { option: "hadamard", .. })), "{block}: {got:?}");
    }
    for block in [32, 64] {
        let paged = config.layout(CacheLayout::Paged { page: 16, pages: 4 });
        Cache::with_pipelines(pipelines, paged.hadamard(block)).expect("a cache");
    }
}
