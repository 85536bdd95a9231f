//! The operator: attention within buckets of a locality-sensitive hash.

mod backward;
mod config;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::LshBackward;
pub use config::LshConfig;
use dispatch::{LshRounds, LshSizes};
use kernels::lsh_codes::MOST_CHUNKS;

use crate::attention::dispatch::{Chosen, Extras, Keys, Problem};
use crate::attention::{self, scale_in_f32};
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatches, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot, fits, in_scratch,
};
use crate::mask::DeviceMask;
use crate::mask::mods::{Captured, MaskMod, ScoreMod};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, TensorView, check_apart, count};

/// Attention of tokens to tokens with the same hash (Kitaev et al. 2020, "Reformer: the efficient
/// transformer"). Use it for sequences that are too long for full attention: work grows with
/// `rounds · length · chunk`.
///
/// Queries and keys are one tensor, `qk`, and keys are divided by their length. In each round
/// tokens are hashed, `argmax([x R; −x R])` for the rotation R of the round. They are then sorted
/// by bucket and position (stable), and cut into chunks. A token sees the tokens of its bucket in
/// its chunk and in the previous chunk. The first chunk sees the last. A pair that several rounds
/// contain counts once: the result is a softmax over the keys of all rounds. The score of a token
/// with itself is −50000: it attends to itself only if it sees no other. If `chunk` is as long as
/// the sequence, a token sees its whole bucket.
///
/// Lengths need not be divisible by anything. Tokens past the length of a sequence are in a
/// separate bucket. They attend to nothing, give 0, and no token sees them. A sequence gives the
/// same result in a batch as alone.
///
/// Buckets are an output of the forward pass and an input of the backward pass. Both passes use the
/// same buckets. They have no gradient.
///
/// ```no_run
/// # use wgpu_attention::{Error, Gpu, Scratch, TensorView, wgpu};
/// # use wgpu_attention::lsh::{LshAttention, LshConfig, LshForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, [qk, v, rotations, buckets, out]: [TensorView; 5]) -> Result<(), Error> {
/// // 4 rounds of 64 buckets, chunks of 64 tokens.
/// let config = LshConfig::new(8, 64, 4, 64, 64).causal(true);
/// let numbers: Vec<f32> = config.rotations(7); // uploaded as [1, 4, 64, 32]
/// let attention = LshAttention::new(device, config)?;
/// let call = LshForward::new(qk, v, rotations, buckets, out);
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
/// attention.forward(encoder, &call, &mut scratch)
/// # }
/// ```
#[doc(alias = "reformer")]
#[derive(Clone, Debug)]
pub struct LshAttention {
    pipelines: Pipelines,
    config: LshConfig,
    held: MaskMod,
    self_score: ScoreMod,
}

/// One forward call.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `qk` | `[batch, heads, length, head_dim]` | the configured |
/// | `v` | `[batch, heads, length, value_dim]` | the configured |
/// | `rotations` | `[1, rounds, head_dim, n_buckets / 2]` | F32, F16 or BF16 |
/// | `buckets` | `[batch, heads, rounds, length]` | U32 |
/// | `out` | `[batch, heads, length, value_dim]` | the configured |
/// | `lse` | `[batch, heads, length, 1]` | F32 |
/// | `lengths` | `[batch or 1, 1, 1, 1]` | U32 |
///
/// Kernels round normalised keys and the output of each round to the configured type.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LshForward<'a> {
    pub(crate) qk: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) rotations: Option<TensorView<'a>>,
    pub(crate) buckets: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) lse: Option<TensorView<'a>>,
    pub(crate) lengths: Option<TensorView<'a>>,
}

impl<'a> LshForward<'a> {
    /// Hashes `qk` by `rotations` into `buckets`, and writes the result of attention to `out`.
    /// [`LshConfig::rotations`] generates rotations.
    pub fn new(
        qk: TensorView<'a>,
        v: TensorView<'a>,
        rotations: TensorView<'a>,
        buckets: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        LshForward { rotations: Some(rotations), ..Self::with_buckets(qk, v, buckets, out) }
    }

    /// Attends within existing `buckets`, each below `n_buckets`: of an earlier call, or of the
    /// caller's hash.
    pub fn with_buckets(
        qk: TensorView<'a>,
        v: TensorView<'a>,
        buckets: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        LshForward { qk, v, rotations: None, buckets, out, lse: None, lengths: None }
    }

    /// Writes the log-sum-exp of every token's scores to `lse`.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// The number of tokens of each sequence, all unless set. With existing buckets, the bucket of
    /// each token past the length must be `n_buckets`.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }
}

/// Queries, keys and values of all rounds, in bucket order.
#[derive(Clone, Copy)]
struct Sorted<'a> {
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
}

/// A checked forward call.
struct Plan {
    sizes: LshSizes,
    chosen: Chosen,
    size: ScratchSize,
}

/// Returns the mask function for the pairs of a round that no earlier round contains. It reads the
/// codes of `lsh_codes.wgsl`.
fn held(rounds: usize, causal: bool) -> String {
    let order = "if codes_at(at.batch, at.head, at.key, 0u) > codes_at(at.batch, at.head, query, 0u) { return false; }";
    let earlier = "for (var n = 0u; n < round; n++) { if held(at, query, n) { return false; } }";
    format!(
        "fn held(at: At, query: u32, round: u32) -> bool {{
            let key = codes_at(at.batch, at.head, at.key, 1u + 2u * round);
            return key == codes_at(at.batch, at.head, query, 1u + 2u * round)
                || key == codes_at(at.batch, at.head, query, 2u + 2u * round);
        }}
        fn mask_mod(at: At) -> bool {{
            let query = at.query + at.kv_len - at.q_len;
            let round = at.head % {rounds}u;
            let none = codes_at(at.batch, at.head, at.key, 1u + 2u * round) == 0xffffffffu;
            if none || !held(at, query, round) {{ return false; }}
            {}
            {}
            return true;
        }}",
        if causal { order } else { "" },
        if rounds > 1 { earlier } else { "" },
    )
}

const SELF_SCORE: &str = "fn score_mod(score: f32, at: At) -> f32 {
    return select(score, -50000.0, at.key == at.query + at.kv_len - at.q_len);
}";

impl LshAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: LshConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: LshConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(LshAttention {
            pipelines: pipelines.clone(),
            config,
            held: MaskMod::capturing(&held(config.rounds, config.causal), &[Captured::number("codes")])?,
            self_score: ScoreMod::new(SELF_SCORE)?,
        })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs. Each token, head and round needs its query,
    /// key, value and output. It also needs at most 20 bytes, and 8 bytes for each round. Each head
    /// and round needs one more chunk of keys and values.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LshForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors and scratch, or more than 65535 chunks. The
    /// encoder is then unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LshForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &LshForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let scratch: &Scratch = scratch;
        let Plan { sizes, chosen, .. } = attention::dispatch::within(device, |device| {
            let plan = self.check(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let part = |slot| scratch.buffer(slot);
        let rounds = LshRounds::new(sizes, call.buckets, call.lengths, &part)?;
        let sorted = self.sorted(&sizes, &part)?;
        let mut dispatches = Dispatches::new();
        dispatches.extend(call.rotations.map(|rotations| rounds.hash(call.qk, rotations, device)));
        dispatches.extend(rounds.dispatches(part, device)?);
        dispatches.extend(sorted.gather(call, &rounds, device));
        let parts = self.parts(&sizes, &part)?;
        let problem = self.problem(&rounds, &sorted, parts);
        dispatches.extend(attention::dispatch::dispatches(&problem, chosen, chosen.memory(scratch)?, device));
        dispatches.push(rounds.merge(parts, call.out, call.lse, device));
        self.pipelines.bind("lsh attention", &dispatches, scratch.bindings())
    }

    /// Returns the shape of the attention along the bucket order.
    fn shape(&self, sizes: &LshSizes) -> Shape {
        let [batch, heads, q_len, head_dim] = sizes.sorted(0, sizes.head_dim);
        let kv_len = q_len.saturating_add(sizes.ahead());
        Shape { batch, heads, kv_heads: heads, q_len, kv_len, head_dim, value_dim: sizes.value_dim }
    }

    /// Returns the mask: a window of at most two chunks, and within it the pairs of the round.
    fn mask<'a>(&self, rounds: &LshRounds<'a>) -> DeviceMask<'a> {
        let mask = DeviceMask::none().mask_mod(self.held.with(&[rounds.codes])).score_mod(self.self_score);
        match rounds.sizes.ahead() {
            0 => mask,
            chunk => mask.window(2 * chunk - 1, chunk - 1),
        }
    }

    fn problem<'a>(
        &self,
        rounds: &LshRounds<'a>,
        sorted: &Sorted<'a>,
        [out, lse]: [TensorView<'a>; 2],
    ) -> Problem<'a> {
        let shape = self.shape(&rounds.sizes);
        let extras = Extras {
            out,
            mask: self.mask(rounds),
            appended: 0,
            lse: Some(lse),
            weights: None,
            scores: None,
            dropout: None,
        };
        Problem {
            shape,
            q: sorted.q,
            keys: Keys::Tensors { k: sorted.k, v: sorted.v },
            score_vector: None,
            lists: None,
            extras,
            scale: scale_in_f32(self.config.scale, shape.head_dim),
            softcap: None,
            kernel_options: self.config.kernel_options,
        }
    }

    fn sorted<'a>(
        &self,
        sizes: &LshSizes,
        part: &impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Sorted<'a>, Error> {
        let dtype = self.config.dtype;
        let of = |slot, ahead, dim| Ok(in_scratch(part(slot)?, dtype, sizes.sorted(ahead, dim), 0));
        Ok(Sorted {
            q: of(Slot::SortedQueries, 0, sizes.head_dim)?,
            k: of(Slot::SortedKeys, sizes.ahead(), sizes.head_dim)?,
            v: of(Slot::SortedValues, sizes.ahead(), sizes.value_dim)?,
        })
    }

    fn sorted_size(&self, sizes: &LshSizes, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let size = self.config.dtype.bytes() as u64;
        let of = |ahead, dim| fits(count(sizes.sorted(ahead, dim)) as u64, size, device);
        Ok(ScratchSize::default()
            .with(Slot::SortedQueries, of(0, sizes.head_dim)?)
            .with(Slot::SortedKeys, of(sizes.ahead(), sizes.head_dim)?)
            .with(Slot::SortedValues, of(sizes.ahead(), sizes.value_dim)?))
    }

    /// Returns the output and log-sum-exp of each round, in bucket order.
    fn parts<'a>(
        &self,
        sizes: &LshSizes,
        part: &impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<[TensorView<'a>; 2], Error> {
        let out = in_scratch(part(Slot::Context)?, self.config.dtype, sizes.sorted(0, sizes.value_dim), 0);
        Ok([out, in_scratch(part(Slot::Lse)?, DType::F32, sizes.sorted(0, 1), 0)])
    }

    fn parts_size(&self, sizes: &LshSizes, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let size = self.config.dtype.bytes() as u64;
        let out = fits(count(sizes.sorted(0, sizes.value_dim)) as u64, size, device)?;
        let lse = fits(count(sizes.sorted(0, 1)) as u64, 4, device)?;
        Ok(ScratchSize::default().with(Slot::Context, out).with(Slot::Lse, lse))
    }

    /// Checks a call, before its pipelines are compiled.
    fn check(&self, call: &LshForward, device: &DeviceFacts) -> Result<Plan, Error> {
        let LshForward { qk, v, rotations, buckets, out, lse, lengths } = *call;
        let mut tensors = CallTensors::new(device);
        let sizes = self.check_inputs(call, &mut tensors)?;
        let LshSizes { batch, heads, length, head_dim, n_buckets, rounds, .. } = sizes;
        tensors.write("out", out, self.config.dtype, v.shape())?;
        tensors.write("lse", lse, DType::F32, [batch, heads, length, 1])?;
        check_apart(tensors.written(), device)?;
        tensors.read("rotations", rotations, Element::Float, [1, rounds, head_dim, n_buckets / 2])?;
        let hashed = if rotations.is_some() { Access::Write } else { Access::Read };
        tensors.add(hashed, "buckets", buckets, DType::U32, sizes.hashes())?;
        tensors.check_aliasing()?;
        // There is no scratch yet. Plans read only layouts, so any buffer can stand in.
        let part = |_| Ok(qk.buffer);
        let rounds = LshRounds::new(sizes, buckets, lengths, &part)?;
        let size = rounds.scratch_size(device)?.max(self.sorted_size(&sizes, device)?);
        let size = size.max(self.parts_size(&sizes, device)?);
        let problem = self.problem(&rounds, &self.sorted(&sizes, &part)?, self.parts(&sizes, &part)?);
        let chosen = attention::dispatch::choose(&problem.outline(), device)?;
        Ok(Plan { sizes, chosen, size: size.max(chosen.scratch_size()) })
    }

    /// Checks all inputs except the buckets, which a forward call may write.
    fn check_inputs<'a>(
        &self,
        call: &LshForward<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<LshSizes, Error> {
        let LshForward { qk, v, lengths, .. } = *call;
        let LshConfig { heads, head_dim, value_dim, dtype, rounds, n_buckets, chunk, .. } = self.config;
        let [batch, _, length, _] = qk.shape();
        tensors.read("qk", qk, dtype, [batch, heads, length, head_dim])?;
        tensors.read("v", v, dtype, [batch, heads, length, value_dim])?;
        tensors.read_broadcast("lengths", lengths, DType::U32, [batch, 1, 1, 1])?;
        let sizes = LshSizes { batch, heads, length, head_dim, value_dim, rounds, n_buckets, chunk };
        let chunks = sizes.chunks();
        if chunks > MOST_CHUNKS {
            return Err(Error::Option {
                option: "chunk",
                value: chunk as f64,
                expected: "at least the length divided by 65535",
            });
        }
        self.shape(&sizes).check_lengths()?;
        Ok(sizes)
    }
}

impl<'a> Sorted<'a> {
    /// Copies queries, keys and values in bucket order.
    fn gather(&self, call: &LshForward<'a>, rounds: &LshRounds<'a>, device: &DeviceFacts) -> Dispatches<'a> {
        vec![
            rounds.gather(call.qk, self.q, false, device),
            rounds.gather(call.qk, self.k, true, device),
            rounds.gather(call.v, self.v, false, device),
        ]
    }
}
