//! Feature maps of linear attention of the caller's own.

use super::lexical::without_comments;
use super::{Interned, Kind, intern};
use crate::tensor::Error;

/// A feature map of the caller's own for linear attention: WGSL that declares
///
/// ```wgsl
/// fn feature_map(x: f32) -> f32
/// ```
///
/// which every channel of queries and keys is put through. What it may say is what a
/// [`ScoreMod`](super::ScoreMod) may, without `Uniforms` and captured tensors. Results are
/// attention only as far as it is not negative. The backward pass takes its derivative from the
/// text.
///
/// ```
/// use wgpu_attention::linear_attention::{FeatureMap, LinearConfig};
/// use wgpu_attention::mask::FeatureMod;
///
/// # fn main() -> Result<(), wgpu_attention::Error> {
/// let softplus = FeatureMod::new("fn feature_map(x: f32) -> f32 { return max(x, 0.0) + log(1.0 + exp(-abs(x))); }")?;
/// let config = LinearConfig::new(8, 64).feature_map(FeatureMap::Custom(softplus));
/// # let _ = config;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FeatureMod(pub(crate) Interned);

const SIGNATURE: &str = "fn feature_map(x: f32) -> f32";
/// What makes a score function of it.
const AS_SCORE: &str = "\nfn score_mod(score: f32, at: At) -> f32 { return feature_map(score); }\n";

impl FeatureMod {
    /// Reads and checks `text`, which is kept as long as the process runs.
    ///
    /// # Errors
    /// [`Error::Mod`], with line and column of what is wrong.
    pub fn new(text: &str) -> Result<Self, Error> {
        let refused = |message: String| Error::Mod { function: "feature_map", message };
        let words = without_comments(text);
        let mut words =
            words.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        if !words.clone().zip(words.clone().skip(1)).any(|pair| pair == ("fn", "feature_map")) {
            return Err(refused(format!("the function is missing: `{SIGNATURE}`")));
        }
        if words.any(|word| word == "Uniforms") {
            return Err(refused("a feature map has no `Uniforms`; write constants".into()));
        }
        match intern(Kind::Score, &format!("{text}{AS_SCORE}"), &[]) {
            Ok(interned) => Ok(FeatureMod(interned)),
            Err(Error::Mod { message, .. }) if message.contains(AS_SCORE.trim()) => {
                Err(refused(format!("it must be `{SIGNATURE}`")))
            }
            Err(Error::Mod { message, .. }) => Err(refused(message)),
            Err(other) => Err(other),
        }
    }

    /// Refuses a backward pass where the text has no derivative.
    pub(crate) fn check_slope(self) -> Result<(), Error> {
        match &self.0.source().slope {
            Ok(_) => Ok(()),
            Err(why) => Err(Error::Mod { function: "feature_map", message: why.clone() }),
        }
    }
}
