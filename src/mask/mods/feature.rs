//! Custom feature maps of linear attention.

use super::lexical::without_comments;
use super::{Interned, Kind, intern};
use crate::tensor::Error;

/// A custom feature map of linear attention. It is WGSL that declares
///
/// ```wgsl
/// fn feature_map(x: f32) -> f32
/// ```
///
/// which is applied to every channel of queries and keys. The rules for the text are the same as
/// for a [`ScoreMod`](super::ScoreMod), but it cannot have `Uniforms` or captured tensors.
///
/// The results are averages of values only if the map is not negative. The library generates the
/// derivative for the backward pass from the text.
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
/// Makes a score function of the feature map.
const AS_SCORE: &str = "\nfn score_mod(score: f32, at: At) -> f32 { return feature_map(score); }\n";

impl FeatureMod {
    /// Reads and checks `text`, which stays in memory until the process ends.
    ///
    /// # Errors
    /// [`Error::Mod`], with the line and column of the fault.
    pub fn new(text: &str) -> Result<Self, Error> {
        let refused = |message: String| Error::Mod { function: "feature_map", message };
        let words = without_comments(text);
        let mut words =
            words.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        if !words.clone().zip(words.clone().skip(1)).any(|pair| pair == ("fn", "feature_map")) {
            return Err(refused(format!("the function is missing; declare `{SIGNATURE}`")));
        }
        if words.any(|word| word == "Uniforms") {
            return Err(refused("a feature map cannot have `Uniforms`; use constants".into()));
        }
        match intern(Kind::Score, &format!("{text}{AS_SCORE}"), &[]) {
            Ok(interned) => Ok(FeatureMod(interned)),
            Err(Error::Mod { message, .. }) if message.contains(AS_SCORE.trim()) => {
                Err(refused(format!("the signature must be `{SIGNATURE}`")))
            }
            Err(Error::Mod { message, .. }) => Err(refused(message)),
            Err(other) => Err(other),
        }
    }

    /// Returns an error if the text has no derivative for the backward pass.
    pub(crate) fn check_slope(self) -> Result<(), Error> {
        match &self.0.source().slope {
            Ok(_) => Ok(()),
            Err(why) => Err(Error::Mod { function: "feature_map", message: why.clone() }),
        }
    }
}
