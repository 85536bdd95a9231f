//! Functions that take slices: the helpers of `Gpu`, and the reference.

use wgpu_attention::cache::{CacheStorage, ScaleGroup};
use wgpu_attention::mask::block_map;
use wgpu_attention::position::{PositionTable, RopeConfig, RopeOrder, RowPositions};
use wgpu_attention::reference::{self, HostLinear, HostWeights, MultiHeadShape, Options, Real, widen};
use wgpu_attention::{DType, Dropout, Error, HostTensor, Shape, TensorView};

use crate::arena::Buf;
use crate::case::{Case, DropoutData, Expected, HostData, Rules, Weights};
use crate::choices::Choices;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::positions::{strange, strange_sections, width};
use crate::random::noise;
use crate::world::{Outcome, World, refused};

/// Returns a slice of `n` elements, or a wrong number.
fn slice(c: &mut Choices, n: usize, wrong: bool) -> Vec<f32> {
    let n = if wrong {
        c.pick(&[0, 1, n.saturating_sub(1), n.saturating_add(1), n.saturating_mul(2)])
    } else {
        n
    };
    noise(n.min(1 << 16), 0.37)
}

/// Returns the number of elements of a shape, or `usize::MAX` if it overflows.
fn count(sizes: &[usize]) -> usize {
    sizes.iter().fold(1usize, |n, size| n.saturating_mul(*size))
}

/// Makes the elements not fit their shape.
fn spoil<T: Copy>(part: &mut Option<HostData<T>>, c: &mut Choices) {
    if let Some(part) = part {
        match c.below(3) {
            0 => part.shape[c.below(4)] = c.size(),
            1 => part.data.truncate(c.below(part.data.len() + 1)),
            _ => part.shape.swap(c.below(4), c.below(4)),
        }
    }
}

fn spoil_rules(rules: &mut Rules, c: &mut Choices) {
    match c.below(10) {
        0 => spoil(&mut rules.lengths, c),
        1 => spoil(&mut rules.prefix, c),
        2 => spoil(&mut rules.attn_mask, c),
        3 => spoil(&mut rules.tree, c),
        4 => spoil(&mut rules.bias, c),
        5 => spoil(&mut rules.relative, c),
        6 => spoil(&mut rules.slopes, c),
        7 => rules.window = Some([c.size(), c.size()]),
        8 => rules.blocks.iter_mut().for_each(|(_, size)| size[c.below(2)] = c.size()),
        _ => {
            for part in rules.packed.iter_mut().flatten() {
                let mut taken = Some(part.clone());
                spoil(&mut taken, c);
                taken.into_iter().for_each(|taken| *part = taken);
            }
        }
    }
}

fn spoil_shape(shape: &mut Shape, c: &mut Choices) {
    let n = c.size();
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    *[batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim][c.below(7)] = n;
}

/// Calls `Gpu` and the reference with the same slices. They must agree, on refusals too.
pub fn attend(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let kv_heads = c.between(1, 2);
    let rows = f.pick(&[[1, 1], [3, 4], [9, 12]]);
    let mut shape = Shape {
        batch: c.between(1, 2),
        heads: kv_heads * f.between(1, 2),
        kv_heads,
        q_len: c.between(rows[0], rows[1]),
        kv_len: c.between(1, 16),
        head_dim: f.pick(&[4, 5]),
        value_dim: f.pick(&[4, 3]),
    };
    let mask = MaskSpec::new(f, c, &shape);
    let mut rules =
        if mask.is_tame(&world.arena.before) { mask.rules(&world.arena.before) } else { Rules::default() };
    let mut wrong = [false; 3];
    let kind = f.below(6);
    let (mut scale, mut softcap, mut appended) = (None, f.one_in(4).then_some(5.0), 0);
    let mut p = 0.5;
    let mut keep = (kind == 5)
        .then(|| HostData::new(vec![true; shape.q_len * shape.kv_len], [1, 1, shape.q_len, shape.kv_len]));
    let seed = c.word();
    for _ in 0..c.pick(&[0, 0, 0, 1, 1, 2]) {
        match c.below(9) {
            0 => scale = Some(f64::from(c.float())),
            1 => softcap = Some(f64::from(c.float())),
            2 => appended = c.size(),
            3 => spoil_shape(&mut shape, c),
            4 => wrong[c.below(3)] = true,
            5 => p = f64::from(c.float()),
            6 => spoil(&mut keep, c),
            _ => spoil_rules(&mut rules, c),
        }
    }
    let drop = (kind > 3).then(|| match &keep {
        Some(keep) => DropoutData::Given { p, keep: keep.clone() },
        None => DropoutData::Seeded { p, seed },
    });
    *said = format!("{shape:?}, wrong {wrong:?}, {scale:?} {softcap:?} {appended}, {rules:?}, {drop:?}");
    let [q, k, v] = [shape.q(), shape.k(), shape.v()];
    let data =
        [(q, wrong[0]), (k, wrong[1]), (v, wrong[2])].map(|(shape, wrong)| slice(c, count(&shape), wrong));
    let options = Options::new()
        .scale(scale)
        .softcap(softcap)
        .mask(rules.host())
        .dropout(drop.as_ref().map(DropoutData::host))
        .appended(appended)
        .weights(c.one_in(2));
    let functions = rules.score_mod.is_some() || rules.mask_mod.is_some();
    let [q, k, v] = &data;
    let got = if appended == 0 && c.one_in(4) && drop.is_none() && scale.is_none() && softcap.is_none() {
        world.gpu.attend(q, k, v, shape, rules.host()).map(|out| (out, None))
    } else {
        world.gpu.attention(q, k, v, shape, &options).map(|got| (got.out, Some((got.lse, got.weights))))
    };
    let wide = data.each_ref().map(|x| widen::<f64>(x));
    let want = reference::attention(&wide[0], &wide[1], &wide[2], shape, &options);
    world.works(&mut world.scratch())?;
    let (got, want) = match (got, want) {
        (Err(got), Err(_)) => return Ok(refused(&got)),
        // Only the reference accepts functions of the host.
        (Err(got @ Error::Unsupported { .. }), Ok(_)) if appended > 0 || functions => {
            return Ok(refused(&got));
        }
        // A softcap may be too small for f32 alone.
        (Err(got @ Error::Option { .. }), Ok(_)) => return Ok(refused(&got)),
        (Err(got), Ok(_)) => return Err(format!("Gpu refuses ({got}), the reference does not")),
        (Ok(_), Err(want)) => return Err(format!("the reference refuses ({want}), Gpu does not")),
        (Ok(got), Ok(want)) => (got, want),
    };
    let (out, others) = got;
    if out.len() != want.out.len() {
        return Err(format!("{} elements, expected {}", out.len(), want.out.len()));
    }
    let tame = scale.is_none_or(|s| s.abs() < 2.0) && softcap.is_none_or(|s| s > 0.1 && s < 1e3) && p <= 0.9;
    if !tame || shape.flops() > 1e6 {
        return Ok(Outcome::Ran);
    }
    let case = Case {
        name: String::new(),
        shape,
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        scale,
        softcap,
        score_vector: None,
        rules,
        dropout: drop,
        expected: Expected::default(),
    };
    let truth = case.truth(DType::F32, Weights::PerHead(DType::F32));
    truth.out.judge(&widen(&out)).map_err(|e| format!("out: {e}"))?;
    if let Some((lse, weights)) = others {
        truth.lse.judge(&widen(&lse)).map_err(|e| format!("lse: {e}"))?;
        if weights.is_some() != want.weights.is_some() {
            return Err("weights without being asked for, or none where they were".into());
        }
        if let Some(got) = weights {
            let weights = truth.weights.ok_or("no weights")?;
            weights.judge(&widen(&got)).map_err(|e| format!("weights: {e}"))?;
        }
    }
    Ok(Outcome::Judged)
}

/// Calls a layer on slices, and uploads and downloads.
pub fn layer(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    if c.one_in(3) {
        return transfers(world, c, said);
    }
    let kv_heads = f.between(1, 2);
    let mut config = LayerOptions::new(8, kv_heads * f.between(1, 2));
    config.kv_heads = kv_heads;
    (config.add_zero_attn, config.narrow) = (f.one_in(3), f.one_in(4) && config.heads == kv_heads);
    let mut shape =
        MultiHeadShape { batch: c.between(1, 2), q_len: c.between(1, 4), kv_len: c.between(1, 6) };
    let (biased, appends) = (f.one_in(2), f.one_in(3));
    let faults = c.pick(&[0, 0, 0, 1, 1, 2]);
    let mut wrong = [false; 16];
    for _ in 0..faults {
        let n = c.size();
        match c.below(6) {
            0 => *[&mut shape.batch, &mut shape.q_len, &mut shape.kv_len][c.below(3)] = n,
            1 => {
                *[
                    &mut config.heads,
                    &mut config.kv_heads,
                    &mut config.head_dim,
                    &mut config.value_dim,
                    &mut config.query_features,
                    &mut config.key_features,
                    &mut config.value_features,
                    &mut config.out_features,
                ][c.below(8)] = n;
            }
            2 => config.scale = Some(c.float().into()),
            _ => wrong[c.below(16)] = true,
        }
    }
    *said = format!("{config:?}, {shape:?}, biased {biased}, appends {appends}, wrong {wrong:?}");
    let MultiHeadShape { batch, q_len, kv_len } = shape;
    let LayerOptions {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        query_features,
        key_features,
        value_features,
        out_features,
        narrow,
        ..
    } = config;
    let by = if narrow { heads.max(1) } else { 1 };
    let lengths = [
        count(&[batch, q_len, query_features]),
        count(&[batch, kv_len, key_features]),
        count(&[batch, kv_len, value_features]),
        count(&[heads, head_dim, query_features / by]),
        count(&[kv_heads, head_dim, key_features / by]),
        count(&[kv_heads, value_dim, value_features / by]),
        count(&[out_features, heads, value_dim]),
        count(&[heads, head_dim]),
        count(&[kv_heads, head_dim]),
        count(&[kv_heads, value_dim]),
        out_features,
        count(&[kv_heads, head_dim]),
        count(&[kv_heads, value_dim]),
    ];
    let data: Vec<_> = lengths.iter().zip(wrong).map(|(n, wrong)| slice(c, *n, wrong)).collect();
    fn weights<R: Real>(data: &[Vec<R>], biased: bool, appends: bool) -> HostWeights<'_, R> {
        let linear =
            |n: usize| HostLinear { weight: &data[3 + n][..], bias: biased.then(|| &data[7 + n][..]) };
        let bias_kv = appends.then(|| [&data[11][..], &data[12][..]]);
        HostWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv,
            qk_norm: None,
            gate: None,
        }
    }
    let options = Options::new().weights(c.one_in(2));
    let got = world.gpu.multi_head(
        [&data[0], &data[1], &data[2]],
        shape,
        &config.config(),
        &weights(&data, biased, appends),
        &options,
    );
    let wide: Vec<Vec<f64>> = data.iter().map(|x| widen(x)).collect();
    let want = reference::multi_head(
        [&wide[0], &wide[1], &wide[2]],
        shape,
        &config.config(),
        &weights(&wide, biased, appends),
        &options,
    );
    world.works(&mut world.scratch())?;
    match (got, want) {
        (Err(got), Err(_)) => Ok(refused(&got)),
        (Ok(got), Ok(want)) if got.out.len() == want.out.len() => {
            let close = got
                .out
                .iter()
                .zip(&want.out)
                .all(|(g, w)| (f64::from(*g) - w).abs() < 1e-3 * (1.0 + w.abs()));
            let tame = config.scale.is_none_or(|s| s.abs() < 2.0);
            if tame && !close { Err("far from the reference".into()) } else { Ok(Outcome::Ran) }
        }
        (got, want) => Err(format!(
            "Gpu: {:?}, the reference: {:?}",
            got.map(|a| a.out.len()),
            want.map(|a| a.out.len())
        )),
    }
}

fn transfers(world: &mut World, c: &mut Choices, said: &mut String) -> Result<Outcome, String> {
    let n = c.size();
    // A case must not allocate large sizes that the machine might have.
    let bytes = if ((1 << 22)..(1 << 36)).contains(&n) { 64 } else { n };
    let buf = c.pick(&Buf::ALL);
    *said = format!("{bytes} bytes of {buf:?}");
    let gpu = world.gpu.clone();
    let buffer = &world.arena.buffers[buf as usize].clone();
    let got = match c.below(4) {
        0 => gpu.download::<u8>(buffer, bytes).map(|x| x.len()),
        1 => gpu.download::<[u64; 3]>(buffer, bytes / 2).map(|x| x.len()),
        2 => gpu.buffer(bytes).map(|b| b.size() as usize),
        _ => gpu.upload(&vec![1u16; bytes % 1000]).map(|b| b.size() as usize),
    };
    world.works(&mut world.scratch())?;
    match got {
        Ok(_) => Ok(Outcome::Ran),
        Err(e) => Ok(refused(&e)),
    }
}

/// Returns a size whose square can be allocated.
fn side(c: &mut Choices) -> usize {
    let n = c.size();
    if (300..1 << 31).contains(&n) { 7 } else { n }
}

/// Returns sizes that no slice of some thousands of elements has.
fn sizes<const N: usize>(c: &mut Choices) -> [usize; N] {
    let mut sizes = [0; N].map(|_| c.between(1, 4));
    for _ in 0..c.pick(&[0, 0, 1, 2]) {
        let n = c.size();
        sizes[c.below(N)] = n;
    }
    sizes
}

fn of(c: &mut Choices, sizes: &[usize]) -> Vec<f64> {
    let wrong = c.one_in(6);
    widen(&slice(c, count(sizes), wrong))
}

/// Calls the reference alone, stage by stage.
pub fn stages(_: &mut World, _: &mut Choices, c: &mut Choices, said: &mut String) -> Result<Outcome, String> {
    let [b, h, l, d] = sizes::<4>(c);
    let which = c.below(16);
    *said = format!("{which}: {:?}", [b, h, l, d]);
    let [batch, kv_heads, q_len, kv_len] = sizes::<4>(c);
    let [group, head_dim, value_dim] = sizes::<3>(c);
    let shape =
        Shape { batch, heads: kv_heads.saturating_mul(group), kv_heads, q_len, kv_len, head_dim, value_dim };
    *said += &format!(", {shape:?}");
    let done: Result<(), Error> = match which {
        0 => reference::scores(&of(c, &shape.q()), &of(c, &shape.k()), shape, f64::from(c.float())).map(drop),
        1 => reference::weighted_sum(&of(c, &shape.weights()), &of(c, &shape.v()), shape).map(drop),
        2 => {
            let options =
                Options::new().softcap(c.one_in(3).then(|| f64::from(c.float()))).appended(c.below(4));
            reference::softmax(&of(c, &shape.weights()), shape, &options).map(drop)
        }
        3 => {
            let keep = vec![true; c.below(64)];
            let dropout = if c.one_in(2) {
                Dropout::Seeded { p: f64::from(c.float()), seed: c.word() }
            } else {
                Dropout::Given { p: 0.5, keep: HostTensor::new(&keep, [b, h, l, d]) }
            };
            reference::dropout(&mut of(c, &shape.weights()), shape, &dropout)
        }
        4 => {
            let bias = of(c, &[l]);
            let bias = c.one_in(2).then_some(&bias[..]);
            reference::project(&of(c, &[b, h]), &of(c, &[l, h]), bias, h, l).map(drop)
        }
        5 => reference::split_heads(&of(c, &[b, h, l, d]), h, l, d).map(drop),
        6 => reference::join_heads(&of(c, &[b, h, l, d]), h, l, d).map(drop),
        7 => reference::average_heads(&of(c, &[b, h, l]), b, h).map(drop),
        8 => {
            let [o, p] = [of(c, &[b, h]), of(c, &[b, h])];
            let [x, y] = [of(c, &[b]), of(c, &[b])];
            reference::merge(&[(&o[..], &x[..]), (&p[..], &y[..])][..c.below(3)], h).map(drop)
        }
        9 => {
            let config = RopeConfig::new(width(c)).scaling(strange(c));
            let config = if c.one_in(2) { RopeConfig::new(2) } else { config };
            let config = if c.one_in(3) { config.sections(strange_sections(c)) } else { config };
            let numbers = [c.size() as u32; 12];
            let axes = c.pick(&[1, 3, 0]);
            let at = if c.one_in(2) {
                RowPositions::Start(c.size() as u32)
            } else {
                RowPositions::Tensor(HostTensor::new(&numbers[..(axes * b.min(4))], [b, axes, 1, 1]))
            };
            reference::rotate(&of(c, &[b, h, l, d]), [b, h, l, d], &config, at).map(drop)
        }
        10 => {
            let order = if c.one_in(2) { RopeOrder::Half } else { RopeOrder::Interleaved };
            let (cos, sin) = (of(c, &[b, l]), of(c, &[b, l]));
            reference::rotate_by(&of(c, &[b, h, l, d]), [b, h, l, d], order, &cos, &sin).map(drop)
        }
        11 => {
            let length = c.size();
            let length = if ((1 << 12)..(1 << 25)).contains(&length) { 3 } else { length };
            reference::sinusoid::<f64>(width(c).min(1 << 20), f64::from(c.float()), c.size() as u32, length)
                .map(drop)
        }
        12 => {
            let rows = of(c, &[l.min(64), d]);
            let table = if c.one_in(2) {
                PositionTable::Learned(&rows[..])
            } else {
                PositionTable::Sinusoid(10000.0)
            };
            let numbers = [c.size() as u32; 4];
            let at = if c.one_in(2) {
                RowPositions::Start(c.size() as u32)
            } else {
                RowPositions::Tensor(HostTensor::new(&numbers[..b.min(4)], [b, 1, 1, 1]))
            };
            reference::add_positions(&of(c, &[b, h, l, d]), [b, h, l, d], table, at, 1.0).map(drop)
        }
        // The reference visits pairs one by one. So their number is small, or so large that the
        // call is refused.
        13 if shape.flops() < 1e8 || count(&shape.weights()) == usize::MAX => {
            let lengths = [3; 4];
            let mask = wgpu_attention::Mask::causal().lengths(HostTensor::new(&lengths[..1], [1; 4]));
            reference::classify(
                &mask,
                shape,
                [c.size(), c.size()],
                [c.pick(&[1, batch, 0]), c.pick(&[1, shape.heads, 3])],
            )
            .map(drop)
        }
        14 => {
            let storage = match c.below(10) {
                0 => CacheStorage::Q8(ScaleGroup::Of(c.size())),
                1 => CacheStorage::Q4(ScaleGroup::Of(c.size())),
                2 => CacheStorage::F16,
                3 => CacheStorage::BF16,
                4 => CacheStorage::Q8_0,
                5 => CacheStorage::Q4_0,
                6 => CacheStorage::E4M3(ScaleGroup::Of(c.size())),
                7 => CacheStorage::E5M2(ScaleGroup::Row),
                8 => CacheStorage::Gaussian4(ScaleGroup::Of(c.size())),
                _ => CacheStorage::Q4(ScaleGroup::Row),
            };
            let row: Vec<f32> = (0..c.below(70)).map(|_| c.float()).collect();
            let (scales, stored) =
                (reference::cache::scales(storage, &row), reference::cache::stored(storage, &row));
            let _ = (scales, storage.row_bytes(c.size()));
            let rotated = reference::cache::hadamard(&row, c.size());
            if stored.len() != row.len() || rotated.len() != row.len() {
                return Err("another length".into());
            }
            Ok(())
        }
        13 | 15 => {
            let n = side(c);
            let random = [vec![c.size()], vec![]];
            block_map::big_bird(n, c.size(), &[c.size()], &random).map(drop)
        }
        _ => Ok(()),
    };
    // Functions that only compute a number or a name.
    let _ = (shape.flops(), shape.group());
    let element =
        HostTensor::new(&[1u32, 2, 3][..], [b, h, l, d]).at([c.size(), c.size(), c.size(), c.size()]);
    let _ = element;
    let strange = RopeConfig::new(width(c)).scaling(strange(c));
    let _ = (strange.frequencies(), strange.amplitude());
    match done {
        Ok(()) => Ok(Outcome::Ran),
        Err(e) => Ok(refused(&e)),
    }
}

/// Makes views of any arguments. Only calls check them.
pub fn views(
    world: &mut World,
    _: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let shape = sizes::<4>(c);
    *said = format!("{shape:?}");
    let buffer = &world.arena.buffers[0];
    let mut view = TensorView::new(buffer, DType::F32, shape);
    let _ = TensorView::packed_qkv(buffer, DType::F16, shape);
    let _ = (
        TensorView::blhd(buffer, DType::Bool, shape),
        TensorView::matrix(buffer, DType::F32, [shape[0], shape[1]]),
    );
    for _ in 0..c.below(4) {
        view = match c.below(3) {
            0 => view.transposed(c.size(), c.below(5)),
            1 => view.slice(c.below(5), c.size(), c.size()),
            _ => view.with_offset(c.size()).with_strides([c.size(), c.size(), c.size(), c.size()]),
        };
    }
    let _ = (view.shape(), view.strides(), view.offset());
    Ok(Outcome::Ran)
}
