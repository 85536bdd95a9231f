//! Dropout on attention weights, reproducible from a seed and the weight's position.

use crate::tensor::{CallTensors, DType, Error, TensorView};

/// Dropout of attention weights. It zeroes some weights and multiplies the rest by `1 / (1 − p)`,
/// rounded to f32.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Dropout<Keep> {
    /// The generator Philox 4x32-10 decides, the same on every device and on the CPU.
    ///
    /// Its key is `seed`, its counter `[j / 4, i, b · heads + h, 0]`, and its word `j mod 4`.
    /// Weight `[b, h, i, j]` stays if the word is at least `p · 2³²`.
    ///
    /// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    Seeded {
        /// Probability that a weight is dropped, in `[0, 1)`.
        #[doc(alias = "dropout_p")]
        p: f64,
        /// Key of the generator.
        seed: u64,
    },
    /// The caller's tensor decides: Bool, broadcast to `[batch, heads, q_len, kv_len]`.
    Given {
        /// Probability that a weight was dropped, in `[0, 1)`. It only scales the other weights.
        p: f64,
        /// `true` where the weight stays.
        keep: Keep,
    },
}

impl<Keep> Dropout<Keep> {
    pub(crate) fn p(&self) -> f64 {
        match self {
            Dropout::Seeded { p, .. } | Dropout::Given { p, .. } => *p,
        }
    }

    /// The factor of weights that are not dropped.
    pub(crate) fn factor(&self) -> f32 {
        (1.0 / (1.0 - self.p())) as f32
    }

    pub(crate) fn given(&self) -> Option<&Keep> {
        match self {
            Dropout::Given { keep, .. } => Some(keep),
            Dropout::Seeded { .. } => None,
        }
    }

    pub(crate) fn seed(&self) -> u64 {
        match self {
            Dropout::Seeded { seed, .. } => *seed,
            Dropout::Given { .. } => 0,
        }
    }

    /// The smallest generator word for which a weight stays.
    pub(crate) fn threshold(&self) -> u32 {
        // p < 1 is at most 1 − 2⁻⁵³, so the product is below 2³².
        (self.p() * 4_294_967_296.0) as u32
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let p = self.p();
        if (0.0..1.0).contains(&p) {
            return Ok(());
        }
        Err(Error::Option { option: "dropout.p", value: p, expected: "at least 0 and below 1" })
    }
}

impl<'a> Dropout<TensorView<'a>> {
    /// Checks the dropout of attention weights of a shape.
    pub(crate) fn check_for(
        &self,
        weights: [usize; 4],
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<(), Error> {
        self.check()?;
        tensors.read_broadcast("dropout", self.given().copied(), DType::Bool, weights)
    }
}
