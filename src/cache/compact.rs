//! Removing tokens from the middle of sequences.

use super::sequences::Change;
use super::{Cache, dispatch, sequence_table};
use crate::kernel::{Dispatches, Recorder};
use crate::tensor::{CallTensors, DType, Error, TensorView};

/// The tokens that sequences keep. Other tokens are removed.
///
/// A token is named by its index among the stored tokens of its sequence. Before the first removal
/// that is its position.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Keep<'a> {
    /// For each sequence the indices that all heads and layers keep, in rising order.
    Each(&'a [&'a [usize]]),
    /// For each layer a tensor U32 `[batch, kv_heads, 1, n]` with the `n` indices that a head
    /// keeps, in rising order. With `kv_heads` 1 all heads keep the same. Indices that do not rise,
    /// or that name no stored token, stand for other stored tokens of the head.
    Device(&'a [TensorView<'a>]),
}

impl Cache {
    /// Records the removal of all tokens that sequences do not keep, and all changes since the last
    /// recording. The cache must have been made with
    /// [`CacheConfig::compacts`](super::CacheConfig::compacts).
    ///
    /// The other tokens stay at their positions: masks and rotated keys stay right. The rows
    /// of a head move together, so the sequence has room for new tokens. Its length stays, because
    /// it is the position of the next token; [`stored`](Self::stored) is the number of its tokens.
    /// A paged cache frees pages. If sequences share a page, all but the last get a copy before
    /// rows move in it.
    ///
    /// H2O (Zhang et al. 2023) and SnapKV (Li et al. 2024) remove tokens in this way. They choose
    /// tokens by their attention weights. Record appends and queries of the last advance before
    /// this call; [`advance`](Self::advance) comes next. A compacted sequence cannot become shorter
    /// than it was, except by [`clear`](Self::clear).
    ///
    /// ```no_run
    /// # fn f(encoder: &mut wgpu::CommandEncoder, cache: &mut wgpu_attention::Cache)
    /// # -> Result<(), wgpu_attention::Error> {
    /// // One sequence of 100 tokens keeps its first 4 and its last 32.
    /// let keep: Vec<usize> = (0..4).chain(68..100).collect();
    /// cache.compact(encoder, wgpu_attention::cache::Keep::Each(&[&keep]))?;
    /// assert_eq!([cache.len(0), cache.stored(0)], [Some(100), Some(36)]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Unsupported`] if the cache does not store positions, or if only the device knows
    ///   the length of a sequence.
    /// - [`Error::Length`] unless there is a list for each sequence, or a tensor for each layer.
    /// - [`Error::Option`] for indices on the host that do not rise or that name no stored token.
    /// - [`Error::Option`] if a tensor has more indices than a sequence has tokens.
    /// - [`Error::OutOfPages`] if a shared page must be copied and too few pages are free.
    /// - Everything that [`Error`] lists for tensors.
    ///
    /// On an error nothing is recorded and the cache does not change.
    #[doc(alias = "evict")]
    #[doc(alias = "H2O")]
    #[doc(alias = "SnapKV")]
    pub fn compact(&mut self, into: &mut impl Recorder, keep: Keep) -> Result<(), Error> {
        if !self.config.compacts {
            let why = "the cache has no positions of its tokens; set `CacheConfig::compacts`";
            return Err(Error::Unsupported { what: "a compaction", why });
        }
        let counts = self.counts_of(&keep)?;
        // The first row that may change.
        let first = |s: usize| match keep {
            Keep::Each(lists) => lists[s].iter().zip(0..).take_while(|(token, n)| **token == *n).count(),
            Keep::Device(_) => 0,
        };
        let Change { after, edits, copies } = self.sequences.compact(&counts, first)?;
        let most = counts.iter().copied().max().unwrap_or(0);
        let device = &self.pipelines.facts();
        let uploaded = match keep {
            Keep::Each(lists) => Some(sequence_table::upload_lists(self.pipelines.device(), lists, most)?),
            Keep::Device(_) => None,
        };
        let shape = [self.config.batch, 1, 1, most];
        let on_host = uploaded.as_ref().map(|buffer| TensorView::new(buffer, DType::U32, shape));
        let list = |layer: usize| match keep {
            Keep::Each(_) => on_host,
            Keep::Device(lists) => lists.get(layer).copied(),
        };
        let layers = self.layers.iter().enumerate().filter(|_| most > 0);
        let moves = layers.filter_map(|(n, buffers)| Some((self.layer(buffers, false), list(n)?)));
        let moves: Dispatches =
            moves.flat_map(|(layer, list)| dispatch::compact(&layer, list, most, device)).collect();
        let moves = match keep {
            Keep::Each(_) => self.bind_once(&moves)?,
            Keep::Device(_) => self.pipelines.bind("cache", &moves, &self.bindings)?,
        };
        let copies = self.pipelines.bind("cache", &self.copies(&copies), &self.bindings)?;
        let call = self.bind_edits(&edits)?.then(copies).then(moves);
        // Nothing can fail after this line.
        self.sequences.commit(after);
        self.advanced = 0;
        call.record(into);
        Ok(())
    }

    /// The number of tokens that a sequence has in memory, or `None` if only the device knows its
    /// length. It is less than [`len`](Self::len) after a [`compact`](Self::compact) and in a full
    /// ring.
    pub fn stored(&self, sequence: usize) -> Option<usize> {
        self.sequences.stored(sequence)
    }

    /// Checks `keep`, and returns the number of tokens that each sequence keeps.
    fn counts_of(&self, keep: &Keep) -> Result<Vec<usize>, Error> {
        let config = &self.config;
        match keep {
            Keep::Each(lists) => {
                if lists.len() != config.batch {
                    return Err(Error::Length { tensor: "keep", expected: config.batch, got: lists.len() });
                }
                for (s, list) in lists.iter().enumerate() {
                    let stored = self.stored(s).unwrap_or(usize::MAX);
                    let falls = list.windows(2).find(|pair| pair[0] >= pair[1]).map(|pair| pair[1]);
                    if let Some(index) = falls.or(list.last().copied().filter(|last| *last >= stored)) {
                        let expected = "rising indices of stored tokens, below the number of stored tokens";
                        return Err(Error::Option { option: "keep", value: index as f64, expected });
                    }
                }
                Ok(lists.iter().map(|list| list.len()).collect())
            }
            Keep::Device(lists) => {
                if lists.len() != config.layers {
                    return Err(Error::Length { tensor: "keep", expected: config.layers, got: lists.len() });
                }
                let device = &self.pipelines.facts();
                let mut most = 0;
                for (layer, list) in lists.iter().enumerate() {
                    let [_, heads, _, n] = list.shape();
                    if layer == 0 {
                        most = n;
                    }
                    let heads = if heads == 1 { 1 } else { config.kv_heads };
                    let mut tensors = CallTensors::new(device);
                    tensors.read("keep", *list, DType::U32, [config.batch, heads, 1, most])?;
                    tensors.write_checked(self.tensors(layer).chain([("cache", self.lengths())]));
                    tensors.finish()?;
                }
                Ok(vec![most; config.batch])
            }
        }
    }
}
