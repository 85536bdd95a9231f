//! Mods: custom score and mask functions, in WGSL.

mod combine;
mod derive;
mod feature;
mod invalid;
mod lexical;
mod source;
mod text;
mod write;

use combine::{Combination, combined};
pub use feature::FeatureMod;
pub(crate) use source::Source;
use text::UNIFORM_WORDS;

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::device::DeviceFacts;
use crate::tensor::dtype::Element;
use crate::tensor::{Access, CallTensors, DType, Error, TensorView};

/// The most tensors that a mod captures.
pub(crate) const MOST_CAPTURED: usize = 4;

/// A pair of query and key: the argument `At` of a mod's WGSL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct At {
    /// The batch entry.
    pub batch: u32,
    /// The head of queries.
    pub head: u32,
    /// The head of keys and values for this head of queries.
    pub kv_head: u32,
    /// The query's row in q.
    pub query: u32,
    /// The key's row in k; in a cache, its position in the sequence.
    pub key: u32,
    /// The key at which the query is; later keys are its future.
    ///
    /// The mask's alignment, query offsets or packed sequences define it. With
    /// [`Alignment::TopLeft`](crate::Alignment::TopLeft) it is FlexAttention's `q_idx`.
    pub position: i32,
    /// The first key of the query's sequence, with packed sequences.
    pub sequence_start: u32,
    /// The number of query rows in the call, even if a sequence of a cache has fewer.
    pub q_len: u32,
    /// The number of keys without keys that a layer appends; in a cache, the sequence's length.
    pub kv_len: u32,
    /// The query's document, or 0 if the mask has no documents.
    pub query_document: u32,
    /// The key's document, or 0 if the mask has no documents.
    pub key_document: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Score,
    /// A mask of pairs that are seen.
    Pairs,
}

/// A tensor that a mod reads. For a tensor named `table`, the text calls `table_at(a, b, c, d)`
/// with an index for each of the four axes.
///
/// On an axis of 1 every index reads the one element. An index past the end reads the last element.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Captured {
    name: String,
    of: Element,
}

impl Captured {
    /// Makes a tensor whose elements the mod reads as f32, from F32, F16 or BF16.
    pub fn float(name: impl Into<String>) -> Self {
        Captured { name: name.into(), of: Element::Float }
    }

    /// Makes a tensor whose elements the mod reads as u32, from U32.
    pub fn number(name: impl Into<String>) -> Self {
        Captured { name: name.into(), of: Element::Number }
    }

    /// Makes a tensor whose elements the mod reads as bool, from Bool.
    pub fn bool(name: impl Into<String>) -> Self {
        Captured { name: name.into(), of: Element::Bool }
    }

    /// Checks that the name is an identifier, and that no other captured tensor has it.
    fn check(&self, others: &[Captured]) -> Result<(), String> {
        let name = &self.name;
        let starts = name.starts_with(|c: char| c.is_ascii_alphabetic());
        if !starts || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(format!("`{name}` cannot name a captured tensor; use letters, digits and `_`"));
        }
        if others.iter().any(|other| other.name == *name) {
            return Err(format!("two captured tensors have the name `{name}`"));
        }
        Ok(())
    }
}

/// A text that was read. The process reads each text once and never frees it.
#[derive(Clone, Copy)]
pub(crate) struct Interned(&'static Source);

impl PartialEq for Interned {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Interned {}

impl Hash for Interned {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::ptr::from_ref(self.0).hash(state);
    }
}

impl fmt::Debug for Interned {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.0.kind.function())
    }
}

type Key = (Kind, String, Vec<Captured>);

fn intern(kind: Kind, text: &str, captured: &[Captured]) -> Result<Interned, Error> {
    static KNOWN: OnceLock<Mutex<HashMap<Key, &'static Source>>> = OnceLock::new();
    let known = || KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (kind, text.to_string(), captured.to_vec());
    if let Some(source) = known().get(&key) {
        return Ok(Interned(source));
    }
    let refused = |message| Error::Mod { function: kind.function(), message };
    if captured.len() > MOST_CAPTURED {
        return Err(refused(format!(
            "{} tensors are captured, but at most {MOST_CAPTURED} are supported",
            captured.len()
        )));
    }
    for (n, one) in captured.iter().enumerate() {
        one.check(&captured[..n]).map_err(refused)?;
    }
    let source = source::read(kind, text, captured).map_err(refused)?;
    // Another thread may have read the text meanwhile.
    Ok(Interned(known().entry(key).or_insert_with(|| Box::leak(Box::new(source)))))
}

impl Interned {
    /// The prefix of the names in its text.
    pub fn prefix(self) -> &'static str {
        self.0.kind.prefix()
    }

    pub fn source(self) -> &'static Source {
        self.0
    }

    /// The members of `At` that the text uses: name, type, and WGSL expression.
    pub fn members(self) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        text::AT.into_iter().zip(&self.0.members).filter(|(_, used)| **used).map(|(member, _)| member)
    }

    pub fn uniform_words(self) -> usize {
        self.0.uniform_words
    }

    /// The name of the n-th captured tensor's gradient.
    pub fn gradient_name(self, n: usize) -> Option<&'static str> {
        self.0.gradients.get(n).map(String::as_str)
    }

    /// The text of the derivative by readings of the n-th captured tensor, if there is one.
    pub fn derivative_by_captured(self, n: usize) -> Option<&'static str> {
        self.0.captured_slopes.get(n)?.as_deref().ok()
    }

    pub fn refuse<T>(self, message: String) -> Result<T, Error> {
        Err(Error::Mod { function: self.0.kind.function(), message })
    }
}

/// The dtypes of a call's captured tensors.
pub(crate) type Dtypes = [Option<DType>; MOST_CAPTURED];

/// A mod with its captured tensors and uniforms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound<'a> {
    pub interned: Interned,
    tensors: [Option<TensorView<'a>>; MOST_CAPTURED],
    given: usize,
    words: [u32; UNIFORM_WORDS],
    bytes: usize,
}

impl<'a> Bound<'a> {
    fn new(interned: Interned, tensors: &[TensorView<'a>]) -> Self {
        Bound {
            interned,
            tensors: std::array::from_fn(|n| tensors.get(n).copied()),
            given: tensors.len(),
            words: [0; UNIFORM_WORDS],
            bytes: 0,
        }
    }

    fn uniforms(mut self, bytes: &[u8]) -> Self {
        self.bytes = bytes.len();
        for (word, four) in self.words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([four[0], four[1], four[2], four[3]]);
        }
        self
    }

    /// The captured tensors, with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'a>)> + use<'a> {
        let names = self.interned.0.captured.iter().map(|captured| captured.name.as_str());
        names.zip(self.tensors).filter_map(|(name, view)| Some((name, view?)))
    }

    pub fn dtypes(&self) -> Dtypes {
        self.tensors.map(|view| view.map(|view| view.dtype()))
    }

    pub fn words(&self) -> &[u32] {
        &self.words[..self.interned.uniform_words()]
    }

    /// Checks the gradients of its tensors, and that the text has derivatives for them.
    pub fn check_gradients<'g>(
        &self,
        gradients: &CapturedGradients<'g>,
        tensors: &mut CallTensors<'g, '_>,
    ) -> Result<(), Error> {
        let Source { captured, captured_slopes, .. } = self.interned.0;
        if gradients.given > captured.len() {
            let message = format!(
                "the function captures {} tensors, but {} gradients are requested",
                captured.len(),
                gradients.given
            );
            return self.interned.refuse(message);
        }
        for (n, view) in gradients.wanted() {
            if let Some(Err(why)) = captured_slopes.get(n) {
                return self.interned.refuse(why.clone());
            }
            let (Some(name), Some(own)) = (self.interned.gradient_name(n), self.tensors[n]) else { continue };
            tensors.gradient(name, Some(view), own.dtype(), own.shape())?;
        }
        Ok(())
    }

    /// Checks the tensors and uniforms against the declarations in the text.
    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let Source { captured, uniform_words, .. } = self.interned.0;
        if self.given != captured.len() {
            let names: Vec<_> = captured.iter().map(|captured| captured.name.as_str()).collect();
            let wanted = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            return self
                .interned
                .refuse(format!("the function captures {wanted}, but {} tensors were passed", self.given));
        }
        if self.bytes != 4 * uniform_words {
            let wanted = 4 * uniform_words;
            return self
                .interned
                .refuse(format!("`Uniforms` has {wanted} bytes, but {} were passed", self.bytes));
        }
        for (captured, (name, view)) in captured.iter().zip(self.tensors()) {
            view.check_element(name, captured.of)?;
            if view.shape().contains(&0) {
                return Err(Error::ZeroSize { tensor: name, axis: "an axis" });
            }
            view.check(name, Access::Read, device)?;
        }
        Ok(())
    }
}

/// The output tensors for the gradients of captured tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CapturedGradients<'a> {
    tensors: [Option<TensorView<'a>>; MOST_CAPTURED],
    given: usize,
}

impl<'a> CapturedGradients<'a> {
    pub fn new(gradients: &[Option<TensorView<'a>>]) -> Self {
        CapturedGradients {
            tensors: std::array::from_fn(|n| gradients.get(n).copied().flatten()),
            given: gradients.len(),
        }
    }

    /// The gradients that the caller requests, each with the index of its captured tensor.
    pub fn wanted(&self) -> impl Iterator<Item = (usize, TensorView<'a>)> + use<'a> {
        self.tensors.into_iter().enumerate().filter_map(|(n, view)| Some((n, view?)))
    }
}

macro_rules! mods {
    ($(#[$doc:meta])* $name:ident, $(#[$bound_doc:meta])* $bound:ident, $kind:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub(crate) Interned);

        impl $name {
            /// Reads and checks `text`, which captures no tensors.
            ///
            /// # Errors
            /// [`Error::Mod`], with the line and column of the fault.
            pub fn new(text: &str) -> Result<Self, Error> {
                Self::capturing(text, &[])
            }

            /// Reads and checks `text`, which captures up to four tensors. A text stays in memory
            /// until the process ends. Put values that change from call to call into tensors and
            /// uniforms.
            ///
            /// # Errors
            /// [`Error::Mod`], with the line and column of the fault.
            pub fn capturing(text: &str, captured: &[Captured]) -> Result<Self, Error> {
                Ok(Self(intern($kind, text, captured)?))
            }

            /// Returns the mod for a call that captures `tensors`, in the order of
            /// [`capturing`](Self::capturing).
            pub fn with<'a>(&self, tensors: &[TensorView<'a>]) -> $bound<'a> {
                $bound(Bound::new(self.0, tensors))
            }

            /// Returns the mod for a call, with the bytes of the text's struct `Uniforms` in WGSL's
            /// layout.
            pub fn uniforms<'a>(&self, bytes: &[u8]) -> $bound<'a> {
                self.with(&[]).uniforms(bytes)
            }
        }

        $(#[$bound_doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $bound<'a>(Bound<'a>);

        impl<'a> $bound<'a> {
            /// Sets the bytes of the text's struct `Uniforms`, in WGSL's layout.
            #[must_use]
            pub fn uniforms(self, bytes: &[u8]) -> Self {
                Self(self.0.uniforms(bytes))
            }
        }

        impl<'a> From<$name> for $bound<'a> {
            fn from(own: $name) -> Self {
                own.with(&[])
            }
        }
    };
}

mods! {
    /// A custom score function, as in FlexAttention (Dong et al. 2024, "FlexAttention"). It is WGSL
    /// that declares
    ///
    /// ```wgsl
    /// fn score_mod(score: f32, at: At) -> f32
    /// ```
    ///
    /// `score` is scale · q·k, and [`At`] is its pair. Softcap, bias and further terms follow.
    ///
    /// The text may declare functions, constants, structs, and a struct `Uniforms` of up to 64
    /// bytes, which `uniforms()` reads. A score of −∞ (`neg_inf()`) hides the pair.
    ///
    /// A mod computes from its arguments. The text must not have module variables, bindings,
    /// pointer arguments, barriers, entry points or recursion. All loops together end after 4096
    /// rounds per pair.
    ///
    /// The library generates the derivative by the score from the text, in forward mode, for the
    /// backward pass. A text may instead declare it in a second function,
    /// `fn score_mod_slope(score: f32, at: At) -> f32`.
    ///
    /// ```
    /// use wgpu_attention::{Mask, TensorView};
    /// use wgpu_attention::mask::{Captured, DeviceMask, ScoreMod};
    ///
    /// fn mask<'a>(table: TensorView<'a>) -> Result<DeviceMask<'a>, wgpu_attention::Error> {
    ///     // A learned bias by how far the key is, in steps that double.
    ///     let by_distance = ScoreMod::capturing(
    ///         "fn score_mod(score: f32, at: At) -> f32 {
    ///             let far = f32(abs(at.position - i32(at.key)));
    ///             return score + table_at(0u, at.head, 0u, u32(log2(1.0 + far)));
    ///         }",
    ///         &[Captured::float("table")],
    ///     )?;
    ///     Ok(Mask::causal().score_mod(by_distance.with(&[table])))
    /// }
    /// ```
    ScoreMod,
    /// A [`ScoreMod`] with its captured tensors and uniforms, for a call.
    BoundScoreMod, Kind::Score
}

mods! {
    /// A custom mask. It is WGSL that declares
    ///
    /// ```wgsl
    /// fn mask_mod(at: At) -> bool
    /// ```
    ///
    /// which returns `true` for pairs that are seen. The rules for the text are the same as for a
    /// [`ScoreMod`].
    ///
    /// The function hides pairs in addition to the mask's other rules. Kernels evaluate it for
    /// pairs that these rules permit, except in full blocks of a map.
    /// [`Attention::classify`](crate::Attention::classify) makes a block map of it, with which
    /// later calls skip blocks.
    MaskMod,
    /// A [`MaskMod`] with its captured tensors and uniforms, for a call.
    BoundMaskMod, Kind::Pairs
}

impl<'a> BoundMaskMod<'a> {
    /// Returns the mask of pairs that both masks see.
    ///
    /// ```
    /// use wgpu_attention::Error;
    /// use wgpu_attention::mask::MaskMod;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let causal = MaskMod::new("fn mask_mod(at: At) -> bool { return i32(at.key) <= at.position; }")?;
    /// let near = MaskMod::new(
    ///     "struct Uniforms { width: u32 }
    ///     fn mask_mod(at: At) -> bool { return at.key + uniforms().width >= at.query; }",
    /// )?;
    /// let both = near.uniforms(&128u32.to_ne_bytes()).and(causal)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Mod`], here and in the methods below, if the two together capture more than one mod
    /// may.
    ///
    /// The combined mod captures the tensors of the first, then of the second. It compiles once,
    /// for any captured tensors.
    pub fn and(self, other: impl Into<BoundMaskMod<'a>>) -> Result<Self, Error> {
        combined(Combination::And, &[self.0, other.into().0]).map(Self)
    }

    /// Returns the mask of pairs that either mask sees.
    ///
    /// # Errors
    /// As [`and`](Self::and).
    pub fn or(self, other: impl Into<BoundMaskMod<'a>>) -> Result<Self, Error> {
        combined(Combination::Or, &[self.0, other.into().0]).map(Self)
    }

    /// Returns the mask of pairs that this mask does not see.
    ///
    /// # Errors
    /// As [`and`](Self::and).
    pub fn inverted(self) -> Result<Self, Error> {
        combined(Combination::Not, &[self.0]).map(Self)
    }

    /// Returns a mask that uses the n-th of `mods` for the n-th batch entry. Further entries use
    /// the last mod.
    ///
    /// # Errors
    /// As [`and`](Self::and), and for no mods.
    pub fn per_batch(mods: &[BoundMaskMod<'a>]) -> Result<Self, Error> {
        let mods: Vec<_> = mods.iter().map(|one| one.0).collect();
        combined(Combination::PerBatch, &mods).map(Self)
    }

    /// Returns the mask for packed sequences ([`Mask::packed`](crate::Mask::packed)). `key` and
    /// `position` count from the first key of the query's sequence. `query` equals `position`.
    ///
    /// # Errors
    /// As [`and`](Self::and).
    pub fn per_sequence(self) -> Result<Self, Error> {
        combined(Combination::PerSequence, &[self.0]).map(Self)
    }
}

impl<'a> BoundScoreMod<'a> {
    /// Returns the score function `other` of this function's result, with their derivatives.
    ///
    /// # Errors
    /// [`Error::Mod`] if both together capture more than one mod may, or if one declares a
    /// `score_mod_slope`.
    pub fn then(self, other: impl Into<BoundScoreMod<'a>>) -> Result<Self, Error> {
        combined(Combination::Then, &[self.0, other.into().0]).map(Self)
    }
}

/// The mods of a mask on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceMods<'a> {
    pub(crate) score: Option<Bound<'a>>,
    pub(crate) pairs: Option<Bound<'a>>,
}

impl<'a> DeviceMods<'a> {
    pub(crate) fn set_score(&mut self, BoundScoreMod(bound): BoundScoreMod<'a>) {
        self.score = Some(bound);
    }

    pub(crate) fn set_pairs(&mut self, BoundMaskMod(bound): BoundMaskMod<'a>) {
        self.pairs = Some(bound);
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Bound<'a>> + use<'a> {
        [self.score, self.pairs].into_iter().flatten()
    }

    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        self.all().try_for_each(|bound| bound.check(device))
    }

    /// Returns an error with the reason if the score function has no derivative.
    pub(crate) fn check_slope(&self) -> Result<(), Error> {
        match self.score.map(|bound| (bound.interned, &bound.interned.0.slope)) {
            Some((interned, Err(why))) => interned.refuse(why.clone()),
            _ => Ok(()),
        }
    }
}

/// A function of a score and its pair.
type ScoreFn<'a> = dyn Fn(f64, &At) -> f64 + Sync + 'a;

/// The mods of a mask on the host, for the reference. They are `Sync`, so that futures which hold a
/// mask are `Send`.
#[derive(Clone, Copy, Default)]
pub struct HostMods<'a> {
    pub(crate) score: Option<&'a ScoreFn<'a>>,
    pub(crate) slope: Option<&'a ScoreFn<'a>>,
    pub(crate) pairs: Option<&'a (dyn Fn(&At) -> bool + Sync + 'a)>,
}

impl HostMods<'_> {
    pub(crate) fn is_any(&self) -> bool {
        self.score.is_some() || self.pairs.is_some()
    }
}

impl fmt::Debug for HostMods<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("HostMods")
            .field("score", &self.score.is_some())
            .field("slope", &self.slope.is_some())
            .field("pairs", &self.pairs.is_some())
            .finish()
    }
}
