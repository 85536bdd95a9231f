//! The configuration of attention within buckets.

use crate::attention::{check_dtype, check_options};
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::tensor::{DType, Error, check_sizes};

/// The most rounds and buckets.
const MOST_ROUNDS: usize = 64;
const MOST_BUCKETS: usize = 65534;

/// The configuration of an [`LshAttention`](super::LshAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct LshConfig {
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) rounds: usize,
    pub(crate) n_buckets: usize,
    pub(crate) chunk: usize,
    pub(crate) causal: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) kernel_options: KernelOptions,
}

impl LshConfig {
    /// Configures `heads` heads of `head_dim` channels. Tokens are hashed in `rounds` rounds (1 to
    /// 64) into `n_buckets` buckets (even, at most 65534). Sorted tokens are cut into chunks of
    /// `chunk` tokens. The defaults: f32, scale `1 / √head_dim`, not causal. Usual are chunks of 64
    /// tokens, and about twice as many tokens in a bucket as in a chunk.
    pub fn new(heads: usize, head_dim: usize, rounds: usize, n_buckets: usize, chunk: usize) -> Self {
        LshConfig {
            heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            rounds,
            n_buckets,
            chunk,
            causal: false,
            scale: None,
            kernel_options: KernelOptions::new(),
        }
    }

    /// Channels of values and of the output, `head_dim` unless set.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Element type of qk, v and out: F32, F16 or BF16. Sums are always f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// True if a token sees no later token.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The factor of scores, rounded to f32. The default is `1 / √head_dim`.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// The options that select kernels without changing the result; see [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns random rotations `[rounds, head_dim, n_buckets / 2]`. They are standard normal
    /// numbers (Box and Muller 1958) from SplitMix64 (Steele et al. 2014). The same seed gives the
    /// same rotations on every machine.
    pub fn rotations(&self, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut unit = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            // In (0, 1].
            (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64
        };
        let numbers = [self.rounds, self.head_dim, self.n_buckets / 2];
        let numbers = numbers.into_iter().fold(1usize, usize::saturating_mul);
        let normal = |_| ((-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos()) as f32;
        (0..numbers).map(normal).collect()
    }

    pub(super) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        self.kernel_options.refuse_batch_invariant("`batch_invariant` with LSH attention")?;
        let LshConfig { heads, head_dim, value_dim, rounds, n_buckets, chunk, .. } = *self;
        let sizes = [
            ("heads", heads),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
            ("rounds", rounds),
            ("n_buckets", n_buckets),
            ("chunk", chunk),
        ];
        check_sizes("config", &sizes)?;
        let most = [
            ("rounds", rounds, MOST_ROUNDS, "at most 64"),
            ("n_buckets", n_buckets, MOST_BUCKETS, "at most 65534"),
            ("chunk", chunk, 1 << 28, "at most 2^28"),
        ];
        if let Some((option, n, _, expected)) = most.into_iter().find(|(_, n, most, _)| n > most) {
            return Err(Error::Option { option, value: n as f64, expected });
        }
        if !n_buckets.is_multiple_of(2) {
            let (what, by) = ("n_buckets", "a rotation and its negative");
            return Err(Error::NotDivisible { what, value: n_buckets, by, divisor: 2 });
        }
        check_dtype(self.dtype, device)?;
        check_options(self.scale, None)
    }
}
