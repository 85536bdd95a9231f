//! Mask tensors within WebGPU's default limit of 8 storage buffers.

use std::collections::BTreeMap;

use wgpu_attention::mask::{Blocks, Captured, DeviceMask, MaskMod, ScoreMod};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{
    Attention, Backward, Config, DType, Dropout, Error, Forward, Gpu, KernelOptions, Scratch, ScratchSize,
    Shape, TensorView,
};

use crate::harness::random::noise;
use crate::harness::{Rng, defaults, rest};

const SHAPE: Shape =
    Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 8, kv_len: 8, head_dim: 8, value_dim: 8 };
/// The buffers that remain for tensors of a mask, as `Mask` documents. The forward pass also binds
/// scores and lse. The backward pass binds q, k, v, d_out, row_stats and a gradient.
const FORWARD: usize = 6;
const BACKWARD: usize = 2;

/// An option of a call, and the number of its buffers.
struct Part {
    name: &'static str,
    /// The buffers in a forward and in a backward call.
    buffers: [usize; 2],
    add: fn(&mut Options<'_>),
}

/// A call's options, and a buffer of zeros for each tensor.
struct Options<'a> {
    zeros: &'a [wgpu::Buffer],
    used: usize,
    mask: DeviceMask<'a>,
    dropout: Option<Dropout<TensorView<'a>>>,
    mods: &'a (ScoreMod, MaskMod),
}

impl<'a> Options<'a> {
    fn tensor(&mut self, dtype: DType, shape: [usize; 4]) -> TensorView<'a> {
        self.used += 1;
        TensorView::new(&self.zeros[self.used - 1], dtype, shape)
    }

    fn numbers(&mut self, shape: [usize; 4]) -> TensorView<'a> {
        self.tensor(DType::U32, shape)
    }

    fn bools(&mut self, shape: [usize; 4]) -> TensorView<'a> {
        self.tensor(DType::Bool, shape)
    }

    fn floats(&mut self, shape: [usize; 4]) -> TensorView<'a> {
        self.tensor(DType::F32, shape)
    }
}

macro_rules! part {
    ($name:literal, $tensor:ident($($shape:expr),*), $method:ident) => {
        Part { name: $name, buffers: [1; 2], add: |o| {
            let t = o.$tensor([$($shape),*]);
            o.mask = o.mask.$method(t);
        } }
    };
}

fn parts() -> Vec<Part> {
    vec![
        part!("lengths", numbers(1, 1, 1, 1), lengths),
        part!("prefix", numbers(1, 1, 8, 1), prefix),
        part!("query_offsets", numbers(1, 1, 1, 1), query_offsets),
        part!("attn_mask", bools(1, 1, 8, 8), attn_mask),
        part!("tree", bools(1, 1, 8, 8), tree),
        part!("key_padding_mask", bools(1, 1, 1, 8), key_padding_mask),
        part!("globals", bools(1, 1, 1, 8), globals),
        part!("bias", floats(1, 2, 8, 8), bias),
        part!("alibi", floats(1, 2, 1, 1), alibi),
        part!("relative", floats(1, 2, 1, 5), relative),
        // The lse contains sinks; the backward pass reads them only for their gradient.
        Part { buffers: [1, 0], ..part!("sinks", floats(1, 2, 1, 1), sink_logits) },
        Part {
            name: "blocks",
            buffers: [1; 2],
            add: |o| {
                let map = o.numbers([1, 1, 2, 2]);
                o.mask = o.mask.blocks(Blocks::new(map, [4, 4]));
            },
        },
        Part {
            name: "documents of self-attention",
            buffers: [1; 2],
            add: |o| {
                let ids = o.numbers([1, 1, 8, 1]);
                o.mask = o.mask.documents(ids, ids.transposed(2, 3));
            },
        },
        Part {
            name: "documents of two tensors",
            buffers: [2; 2],
            add: |o| {
                let (queries, keys) = (o.numbers([1, 1, 8, 1]), o.numbers([1, 1, 1, 8]));
                o.mask = o.mask.documents(queries, keys);
            },
        },
        Part {
            name: "packed self-attention",
            buffers: [1; 2],
            add: |o| {
                let starts = o.numbers([1, 1, 1, 3]);
                o.mask = o.mask.packed(starts, starts);
            },
        },
        Part {
            name: "score_mod of a table",
            buffers: [1; 2],
            add: |o| {
                let table = o.floats([1, 1, 1, 8]);
                o.mask = o.mask.score_mod(o.mods.0.with(&[table]));
            },
        },
        Part {
            name: "mask_mod of numbers",
            buffers: [1; 2],
            add: |o| {
                let ids = o.numbers([1, 1, 1, 8]);
                o.mask = o.mask.mask_mod(o.mods.1.with(&[ids]));
            },
        },
        Part {
            name: "kept weights",
            buffers: [1; 2],
            add: |o| {
                let keep = o.bools(SHAPE.weights());
                o.dropout = Some(Dropout::Given { p: 0.5, keep });
            },
        },
    ]
}

fn mods() -> (ScoreMod, MaskMod) {
    let score = "fn score_mod(score: f32, at: At) -> f32 { return score + table_at(0u, 0u, 0u, at.key); }";
    let pairs = "fn mask_mod(at: At) -> bool { return ids_at(0u, 0u, 0u, at.key) == 0u; }";
    let score = ScoreMod::capturing(score, &[Captured::float("table")]).expect("a mod");
    (score, MaskMod::capturing(pairs, &[Captured::number("ids")]).expect("a mod"))
}

fn buffers(gpu: &Gpu, count: usize) -> Vec<wgpu::Buffer> {
    (0..count).map(|_| gpu.upload(&[0f32; 256]).expect("memory")).collect()
}

/// Prepares a call with all its kernels. `Err` is the error of too many buffers. `None`: the parts
/// exclude each other.
fn ready(
    gpu: &Gpu,
    tensors: &[wgpu::Buffer],
    zeros: &[wgpu::Buffer],
    backward: bool,
    parts: &[&Part],
) -> Option<Result<(), Error>> {
    let mods = mods();
    let mut options = Options { zeros, used: 0, mask: DeviceMask::none(), dropout: None, mods: &mods };
    parts.iter().for_each(|part| (part.add)(&mut options));
    let config = Config::new(SHAPE.heads, SHAPE.head_dim);
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let view = |n: usize| TensorView::new(&tensors[n], DType::F32, SHAPE.q());
    let lse = TensorView::new(&tensors[4], DType::F32, SHAPE.lse());
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let call = Forward::new(view(0), view(1), view(2), view(3)).lse(lse);
    let call = call.mask(options.mask).dropout(options.dropout);
    let result = if backward {
        let call = Backward::new(call, view(5)).d_q(view(6)).d_k(view(7)).d_v(view(8));
        attention.backward_scratch_size(&call).and_then(|size| {
            scratch.ensure(gpu.device(), size)?;
            attention.prepare_backward(&call, &mut scratch)
        })
    } else {
        attention.scratch_size(&call).and_then(|size| {
            scratch.ensure(gpu.device(), size)?;
            attention.prepare(&call, &mut scratch)
        })
    };
    match result {
        Err(Error::Option { .. } | Error::Unsupported { .. }) => None,
        other => Some(other.map(drop)),
    }
}

/// Every option, every pair and every three of them. Calls within the documented number of buffers
/// are accepted, with all their kernels. An error refuses the other calls, and states the number of
/// buffers.
#[test]
fn documented_options_fit_default_limits() {
    crate::harness::in_turn!();
    let gpu = &defaults().gpu;
    let (parts, zeros, tensors) = (parts(), buffers(gpu, 8), buffers(gpu, 9));
    let mut sets: Vec<Vec<usize>> = vec![vec![]];
    for size in 1..=3 {
        let longer = sets.iter().filter(|set| set.len() == size - 1).flat_map(|set| {
            let from = set.last().map_or(0, |n| n + 1);
            (from..parts.len()).map(|n| [&set[..], &[n]].concat())
        });
        let longer: Vec<_> = longer.collect();
        sets.extend(longer);
    }
    let (mut seen, mut wrong) = (BTreeMap::new(), Vec::new());
    // Random larger combinations.
    let rng = &mut Rng::named("limits");
    for size in [4, 5, 6, 7] {
        let draw = |_| {
            let mut all: Vec<usize> = (0..parts.len()).collect();
            (0..size).map(|_| all.swap_remove(rng.below(all.len()))).collect()
        };
        sets.extend((0..40).map(draw));
    }
    for set in sets {
        let set: Vec<&Part> = set.into_iter().map(|n| &parts[n]).collect();
        let names: Vec<_> = set.iter().map(|part| part.name).collect();
        // If a rule occurs twice, the later one replaces the earlier one.
        if names.iter().filter(|name| name.starts_with("documents")).count() > 1 {
            continue;
        }
        for (backward, free) in [(false, FORWARD), (true, BACKWARD)] {
            let needed: usize = set.iter().map(|part| part.buffers[usize::from(backward)]).sum();
            if set.len() > 2 && !rest(&format!("limits, {names:?}, {backward}")) {
                continue;
            }
            let accepted = match ready(gpu, &tensors, &zeros, backward, &set) {
                None => continue,
                Some(Ok(())) => true,
                Some(Err(Error::Limit { needed, limit: 8, .. })) if needed > 8 => false,
                Some(Err(error)) => panic!("{names:?}, backward {backward}: {error}"),
            };
            if accepted != (needed <= free) {
                wrong.push(format!("{names:?}, backward {backward}: {needed} buffers, accepted {accepted}"));
            }
            *seen.entry((backward, set.len(), needed <= free)).or_insert(0) += 1;
        }
    }
    crate::harness::say(&format!("options within the default limits (backward, options, fits): {seen:?}"));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn view(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, SHAPE.q())
}

/// A tensor that serves queries and keys is bound once. The results have the same bits as with two
/// tensors.
#[test]
fn shared_tensor_gives_same_bits() {
    crate::harness::in_turn!();
    let gpu = &defaults().gpu;
    let upload = |data: &[u32]| gpu.upload(data).expect("memory");
    let ids = [3u32, 3, 5, 3, 5, 5, 9, 3];
    let starts = [0u32, 3, 8];
    let inputs = [1.0, 2.0, 3.0, 4.0].map(|seed| gpu.upload(&noise(128, seed)).expect("memory"));
    for packed in [false, true] {
        let data: &[u32] = if packed { &starts } else { &ids };
        let (first, second) = (upload(data), upload(data));
        for path in [Algorithm::Fused, Algorithm::Staged] {
            for form in [Target::Gpu, Target::Software] {
                let kernel_options = KernelOptions::default().algorithm(path).target(form);
                let config = Config::new(SHAPE.heads, SHAPE.head_dim).kernel_options(kernel_options);
                let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
                let results = [&first, &second].map(|keys| {
                    let of = |buffer| TensorView::new(buffer, DType::U32, [1, 1, 1, data.len()]);
                    let (queries, keys) = (of(&first), of(keys));
                    let mask = match packed {
                        true => DeviceMask::causal().packed(queries, keys),
                        false => DeviceMask::none().documents(queries.transposed(2, 3), keys),
                    };
                    let outs: Vec<_> =
                        [128, 16, 128, 128, 128].map(|n| gpu.buffer(4 * n).expect("memory")).into();
                    let lse = TensorView::new(&outs[1], DType::F32, SHAPE.lse());
                    let [q, k, v, d_out] = [0, 1, 2, 3].map(|n| view(&inputs[n]));
                    let call = Forward::new(q, k, v, view(&outs[0])).lse(lse).mask(mask);
                    let back = Backward::new(call, d_out);
                    let back = back.d_q(view(&outs[2])).d_k(view(&outs[3])).d_v(view(&outs[4]));
                    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
                    let size = attention.scratch_size(&call).expect("a size");
                    scratch.ensure(gpu.device(), size).expect("memory");
                    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("recorded");
                    let size = attention.backward_scratch_size(&back).expect("a size");
                    scratch.ensure(gpu.device(), size).expect("memory");
                    gpu.submit(|encoder| attention.backward(encoder, &back, &mut scratch)).expect("recorded");
                    let read = |(out, n)| gpu.download::<u32>(out, n).expect("read");
                    outs.iter().zip([128, 16, 128, 128, 128]).map(read).collect::<Vec<_>>()
                });
                assert!(results[0] == results[1], "packed {packed}, {path:?}, {form:?}");
                assert!(results[0][2].iter().any(|bits| *bits != 0));
            }
        }
    }
}
