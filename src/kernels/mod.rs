//! The Rust twin of every shader: parameters, bindings, variants, grid.

pub(crate) mod add_positions;
pub(crate) mod append_keys;
pub(crate) mod average_weights;
pub(crate) mod cache;
pub(crate) mod cache_advance;
pub(crate) mod cache_append;
pub(crate) mod cache_copy;
pub(crate) mod classify;
pub(crate) mod dropout;
pub(crate) mod fused;
pub(crate) mod mask;
pub(crate) mod merge;
pub(crate) mod merge_splits;
pub(crate) mod positions;
pub(crate) mod project;
pub(crate) mod rotate;
pub(crate) mod scores;
pub(crate) mod slots;
pub(crate) mod softmax;
pub(crate) mod tile;
pub(crate) mod turns;
pub(crate) mod weighted_sum;

use crate::device::Fragment;
use crate::kernel::{Kernel, Variant, Width};
use crate::tensor::DType;

/// A shader's text and its twin's name, by stem.
macro_rules! shader {
    ($path:literal) => {
        include_str!(concat!("../../shaders/", $path, ".wgsl"))
    };
}
pub(crate) use shader;

/// The text of the memory that fragments are loaded from and stored to.
pub(crate) fn memory_of(fragment: Fragment) -> &'static str {
    match fragment {
        Fragment::Eight => shader!("shared/fragments_scalars"),
        Fragment::Sixteen => shader!("shared/fragments_vectors"),
    }
}

/// Every kernel variant of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    Project(project::Project),
    Scores(scores::Scores),
    Softmax(softmax::Softmax),
    WeightedSum(weighted_sum::WeightedSum),
    AverageWeights(average_weights::AverageWeights),
    AppendKeys(append_keys::AppendKeys),
    Fused(fused::Fused),
    Merge(merge::Merge),
    MergeSplits(merge_splits::MergeSplits),
    Classify(classify::Classify),
    CacheAdvance(cache_advance::CacheAdvance),
    CacheAppend(cache_append::CacheAppend),
    CacheCopy(cache_copy::CacheCopy),
    Rotate(rotate::Rotate),
    AddPositions(add_positions::AddPositions),
}

impl Variant for Stage {
    fn label(&self) -> &'static str {
        match self {
            Stage::Project(_) => "attention.project",
            Stage::Scores(_) => "attention.scores",
            Stage::Softmax(_) => "attention.softmax",
            Stage::WeightedSum(_) => "attention.weighted_sum",
            Stage::AverageWeights(_) => "attention.average_weights",
            Stage::AppendKeys(_) => "attention.append_keys",
            Stage::Fused(_) => "attention.fused",
            Stage::Merge(_) => "attention.merge",
            Stage::MergeSplits(_) => "attention.merge_splits",
            Stage::Classify(_) => "attention.classify",
            Stage::CacheAdvance(_) => "attention.cache_advance",
            Stage::CacheAppend(_) => "attention.cache_append",
            Stage::CacheCopy(_) => "attention.cache_copy",
            Stage::Rotate(_) => "attention.rotate",
            Stage::AddPositions(_) => "attention.add_positions",
        }
    }

    fn describe(&self) -> Kernel {
        match self {
            Stage::Project(v) => v.describe(),
            Stage::Scores(v) => v.describe(),
            Stage::Softmax(v) => v.describe(),
            Stage::WeightedSum(v) => v.describe(),
            Stage::AverageWeights(v) => v.describe(),
            Stage::AppendKeys(v) => v.describe(),
            Stage::Fused(v) => v.describe(),
            Stage::Merge(v) => v.describe(),
            Stage::MergeSplits(v) => v.describe(),
            Stage::Classify(v) => v.describe(),
            Stage::CacheAdvance(v) => v.describe(),
            Stage::CacheAppend(v) => v.describe(),
            Stage::CacheCopy(v) => v.describe(),
            Stage::Rotate(v) => v.describe(),
            Stage::AddPositions(v) => v.describe(),
        }
    }
}

/// One variant of every kernel along each of its axes.
pub(crate) fn all() -> Vec<Stage> {
    let mut all = Vec::new();
    all.extend(project::Project::all().map(Stage::Project));
    all.extend(scores::Scores::all().map(Stage::Scores));
    all.extend(softmax::Softmax::all().map(Stage::Softmax));
    all.extend(weighted_sum::WeightedSum::all().map(Stage::WeightedSum));
    all.extend(average_weights::AverageWeights::all().map(Stage::AverageWeights));
    all.extend(append_keys::AppendKeys::all().map(Stage::AppendKeys));
    all.extend(fused::Fused::all().into_iter().map(Stage::Fused));
    all.extend(merge::Merge::all().map(Stage::Merge));
    all.extend(merge_splits::MergeSplits::all().map(Stage::MergeSplits));
    all.extend(classify::Classify::all().map(Stage::Classify));
    all.extend(cache_advance::CacheAdvance::all().map(Stage::CacheAdvance));
    all.extend(cache_append::CacheAppend::all().map(Stage::CacheAppend));
    all.push(Stage::CacheCopy(cache_copy::CacheCopy));
    all.extend(rotate::Rotate::all().map(Stage::Rotate));
    all.extend(add_positions::AddPositions::all().map(Stage::AddPositions));
    all
}

/// Values of a variant's axes.
pub(crate) const FLOATS: [DType; 2] = [DType::F32, DType::F16];
pub(crate) const WIDTHS: [Width; 2] = [Width::One, Width::Four];
