//! The configuration of selected attention.

use crate::attention::Config;
use crate::tensor::Error;

/// The configuration of a [`SelectedAttention`](super::SelectedAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct SelectedConfig {
    pub(crate) attention: Config,
    pub(crate) block: usize,
    pub(crate) window: usize,
    pub(crate) latent: bool,
}

impl SelectedConfig {
    /// Configures heads, channels, scale, softcap and types as `attention` does. The defaults: an
    /// index names one key, there is no window, and values are apart from keys.
    pub fn new(attention: Config) -> Self {
        SelectedConfig { attention, block: 1, window: 0, latent: false }
    }

    /// Sets the keys of a block. Index `i` then names the keys `block · i .. block · (i + 1)`. The
    /// last block may be short. NSA, MoBA and VSA select blocks.
    pub fn block(mut self, block: usize) -> Self {
        self.block = block;
        self
    }

    /// Adds the last `window` keys up to the query's position to each list. A key that is listed
    /// too counts once.
    ///
    /// [`Mask::aligned`](crate::Mask::aligned) sets the position. It is the last key for the last
    /// query unless set.
    #[doc(alias = "sliding_window")]
    pub fn window(mut self, window: usize) -> Self {
        self.window = window;
        self
    }

    /// Declares that the values are the first `value_dim` channels of the keys, as in multi-head
    /// latent attention. Pass a slice of the keys as values: `Forward::new(q, kv, kv.slice(3, 0,
    /// value_dim), out)`. The gradient of the keys then has both parts.
    #[doc(alias = "MLA")]
    pub fn latent(mut self, latent: bool) -> Self {
        self.latent = latent;
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.attention.kernel_options.refuse_batch_invariant("`batch_invariant` with selected attention")?;
        let option =
            |option, value: usize, expected| Err(Error::Option { option, value: value as f64, expected });
        if self.block == 0 || self.block > 1 << 20 {
            return option("block", self.block, "1 to 2^20 keys");
        }
        if self.window > 1 << 28 {
            return option("window", self.window, "at most 2^28 keys");
        }
        let Config { head_dim, value_dim, .. } = self.attention;
        if self.latent && value_dim > head_dim {
            return option("value_dim", value_dim, "at most `head_dim` with latent values");
        }
        Ok(())
    }
}
