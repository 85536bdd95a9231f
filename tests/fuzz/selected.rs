//! Attention to selected keys, forward and backward.

use wgpu_attention::reference::{self, Attended, Options, Real, SelectedKeys, widen};
use wgpu_attention::selected::{SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Backward, Config, DType, Forward, KernelOptions, Shape};

use crate::arena::{Buf, Window};
use crate::attention::shape_of;
use crate::call::{float, largest};
use crate::case::{Case, Expected, HostData, Judged, Rules, widened};
use crate::choices::Choices;
use crate::masks::{LENGTHS, MaskSpec, SINKS};
use crate::operands::{Operands, record};
use crate::world::{Outcome, World, refused};

/// The outputs of a forward call, in the order of its writes.
const OUT: usize = 0;
const LSE: usize = 1;
const WEIGHTS: usize = 2;

/// The options of a call.
#[derive(Clone, Copy, Debug)]
struct Selection {
    block: usize,
    window: usize,
    latent: bool,
    scale: Option<f64>,
    softcap: Option<f64>,
}

impl Selection {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let mut selection = Selection {
            block: c.pick(&[1, 1, 2, 5]),
            window: c.pick(&[0, 0, 2, 40]),
            latent: f.one_in(3),
            scale: c.one_in(3).then(|| c.pick(&[0.0, 0.5, 1.0, -0.25])),
            softcap: f.one_in(5).then(|| c.pick(&[0.5, 5.0])),
        };
        if c.one_in(8) {
            *[&mut selection.block, &mut selection.window][c.below(2)] = c.size();
        }
        selection
    }
}

/// Returns any mask, or one that lists may have.
fn mask_for(f: &mut Choices, c: &mut Choices, shape: &Shape, list_heads: usize) -> MaskSpec {
    if f.one_in(3) {
        return MaskSpec::new(f, c, shape);
    }
    let mut mask =
        MaskSpec { causal: f.one_in(2), top_left: c.one_in(3), size: [4, 4], ..Default::default() };
    let Shape { batch, heads, q_len, .. } = *shape;
    let input = |c: &mut Choices, dtype, shape| Some(Window::input(c, dtype, shape, false));
    if f.one_in(3) {
        let rows = [c.pick(&[1, batch]), if list_heads == heads { heads } else { 1 }, c.pick(&[1, q_len]), 1];
        mask.views[LENGTHS] = input(c, DType::U32, rows);
    }
    if f.one_in(2) {
        let sinks = [c.pick(&[1, batch]), c.pick(&[1, heads]), 1, 1];
        mask.views[SINKS] = input(c, float(f), sinks);
    }
    mask
}

pub fn selected(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, form) = (f.one_in(3), f.pick(&[Target::Software, Target::Gpu]));
    let selection = Selection::new(f, c);
    let kv_heads = f.between(1, 2);
    let heads = kv_heads * f.between(1, 3);
    let list_heads = f.pick(&[1, kv_heads, heads]);
    let shape = Shape {
        batch: c.between(1, 2),
        heads,
        kv_heads,
        q_len: c.between(1, 9),
        kv_len: c.between(1, 32),
        head_dim: f.pick(&[4, 8, 5]),
        value_dim: f.pick(&[4, 3]),
    };
    let mut mask = mask_for(f, c, &shape, list_heads);
    let wanted = f.below(3);
    let weights_type = float(f);
    let count = c.between(1, 12);
    let of_weights = [shape.batch, if wanted == 2 { 1 } else { heads }, shape.q_len, count];
    // A separate tensor of latent values is a fault.
    let apart = !selection.latent || c.one_in(8);
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (apart, dtype, shape.v()),
        (true, DType::U32, [shape.batch, list_heads, shape.q_len, count]),
        (backward, dtype, shape.out()),
        (backward, DType::F32, shape.lse()),
        (backward, dtype, shape.out()),
        (backward && c.one_in(2), DType::F32, shape.lse()),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let gradient = if f.one_in(2) { DType::F32 } else { dtype };
        let sinks = mask.views[SINKS].filter(|_| f.one_in(2));
        let writes = [
            (f.below(4) > 0, gradient, shape.q()),
            (f.below(4) > 0, gradient, shape.k()),
            (apart && f.below(4) > 0, gradient, shape.v()),
            (sinks.is_some(), DType::F32, sinks.map_or([1; 4], |sinks| sinks.shape)),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        // Nothing computes weights with a softcap.
        let weighed = wanted > 0 && (selection.softcap.is_none() || c.one_in(8));
        let writes = [
            (true, dtype, shape.out()),
            (true, DType::F32, shape.lse()),
            (weighed, weights_type, of_weights),
        ];
        Operands::new(world, c, &reads, &writes)
    };
    if c.one_in(4) {
        t.input_mut(3).buf = Buf::Bits;
    }
    if accumulates {
        // Gradients are in the other buffer.
        mask.windows().filter(|w| w.buf == Buf::FloatsB).for_each(|w| w.buf = Buf::FloatsA);
    }
    t.spoil(c);
    if c.one_in(8) {
        mask.spoil(c);
    }
    if c.one_in(8) {
        mask.windows().next().into_iter().for_each(|w| w.spoil(c));
    }
    *said = format!("{selection:?}, {list_heads} list heads, {mask:?}, {t:?}, {form:?}");
    let Selection { block, window, latent, scale, softcap } = selection;
    let config = Config::of(&shape)
        .dtype(dtype)
        .scale(scale)
        .softcap(softcap)
        .kernel_options(KernelOptions::new().target(form));
    let config = SelectedConfig::new(config).block(block).window(window).latent(latent);
    let operator = match SelectedAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of_mask: Vec<_> = mask.windows().map(|w| *w).collect();
    let [q, k, indices] = [0, 1, 3].map(|n| t.read(n));
    let v = t.given(2).unwrap_or(k.slice(3, 0, shape.value_dim));
    if backward {
        let forward = Forward::new(q, k, v, t.read(4)).lse(t.read(5)).mask(mask.device(&buffers));
        let call = Backward::new(forward, t.read(6))
            .d_lse(t.given(7))
            .d_q(t.asked(0))
            .d_k(t.asked(1))
            .d_v(t.asked(2))
            .d_sinks(t.asked(3))
            .accumulate(accumulates);
        let call = SelectedBackward::new(call, indices);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &of_mask), record);
    }
    let forward = Forward::new(q, k, v, t.written(OUT)).lse(t.written(LSE)).mask(mask.device(&buffers));
    let call = SelectedForward::new(forward, indices).weights(t.asked(WEIGHTS));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    let judged = mask.is_tame(&world.arena.before);
    let outcome = t.recorded(world, c, size, (judged, &of_mask), record)?;
    if matches!(outcome, Outcome::Judged) {
        judge(world, &t, &mask, selection, shape.value_dim)?;
    }
    Ok(outcome)
}

/// Compares the outputs with the reference. Windows may have other shapes than the plan.
fn judge(
    world: &World,
    t: &Operands,
    mask: &MaskSpec,
    selection: Selection,
    value_dim: usize,
) -> Result<(), String> {
    let (bytes, after) = (&world.arena.before, &world.arena.after);
    let [q, k, indices] = [0, 1, 3].map(|n| *t.input(n));
    let [b, h, l, _] = k.shape;
    let v = if t.given(2).is_some() { *t.input(2) } else { Window { shape: [b, h, l, value_dim], ..k } };
    let rules = mask.rules(bytes);
    // The reference has one function of pairs, for the lists.
    if rules.mask_mod.is_some() {
        return Ok(());
    }
    let case = Case {
        name: String::new(),
        shape: shape_of([q, k, v]),
        q: q.floats(bytes),
        k: k.floats(bytes),
        v: v.floats(bytes),
        scale: selection.scale,
        softcap: selection.softcap,
        score_vector: None,
        rules: Rules { mask_mod: None, ..rules },
        dropout: None,
        expected: Expected::default(),
    };
    let numbers = HostData::new(indices.numbers(bytes), indices.shape);
    let Selection { block, window, .. } = selection;
    let keys = SelectedKeys { indices: numbers.host(), heads: case.shape.heads, block, window };
    let (exact, naive) = (attended::<f64>(&case, &keys)?, attended::<f32>(&case, &keys)?);
    let judge = |what: &str, n: usize, naive: &[f32], exact: Vec<f64>, magnitude: f64| {
        let output = t.output(n);
        let judged = Judged::new(&widened(naive, output.dtype), exact, magnitude);
        judged.judge(&output.wide::<f64>(after)).map(drop).map_err(|e| format!("{what}: {e}"))
    };
    judge("out", OUT, &naive.out, exact.out, largest(&v.wide(bytes)))?;
    let scores = case.largest_score() + 1.0;
    judge("lse", LSE, &naive.lse, exact.lse, scores)?;
    if t.asked(WEIGHTS).is_some() {
        let Shape { batch, heads, kv_len, .. } = case.shape;
        let mean = t.output(WEIGHTS).shape[1] < heads;
        let exact = weights(&keys, exact.weights, [batch, kv_len], mean)?;
        let naive = weights(&keys, naive.weights, [batch, kv_len], mean)?;
        judge("weights", WEIGHTS, &naive, exact, scores)?;
    }
    Ok(())
}

fn attended<R: Real>(case: &Case, keys: &SelectedKeys) -> Result<Attended<R>, String> {
    let sees = |at: &_| keys.names(at);
    let mask = case.rules.host().mask_fn(&sees);
    let options = Options::new().scale(case.scale).softcap(case.softcap).mask(mask).weights(true);
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<R>(x));
    reference::attention(&q, &k, &v, case.shape, &options)
        .map_err(|e| format!("the reference refuses it: {e}"))
}

/// The weights of indices, of each head or the mean over heads.
fn weights<R: Real>(
    keys: &SelectedKeys,
    of_keys: Option<Vec<R>>,
    [batch, kv_len]: [usize; 2],
    mean: bool,
) -> Result<Vec<R>, String> {
    let all = keys.weights(&of_keys.unwrap_or_default(), kv_len).map_err(|e| e.to_string())?;
    if !mean {
        return Ok(all);
    }
    reference::average_heads(&all, batch, keys.heads).map_err(|e| e.to_string())
}
