//! Small cases of every path, mask, storage and layer, for browsers (`scripts/browser`). Natively
//! they are tests too.

mod attention;
mod caches;
mod gradients;
mod layers;
mod masks;
mod one_buffer;
mod others;
#[cfg(not(target_arch = "wasm32"))]
mod tests;

#[cfg(not(target_arch = "wasm32"))]
pub use self::attention::SHAPE;
use self::caches::CacheCase;
use self::layers::SmallLayer;
#[cfg(not(target_arch = "wasm32"))]
pub use self::masks::single as single_masks;
use self::others::Other;
use crate::harness::backward::BackwardSetup;
use crate::harness::gradients::{LayerProblem, Problem};
use crate::harness::layer_backward::LayerBackwardSetup;
use crate::harness::{Case, Profile, Report, Setup};

/// A case with a unique name.
pub struct Small {
    pub name: String,
    profile: &'static Profile,
    work: Work,
}

enum Work {
    /// Attention in one setup. A number of key splits replaces the plan's.
    Attention(Box<Case>, Setup, Option<usize>),
    Layer(Box<SmallLayer>),
    Cache(Box<CacheCase>),
    Other(Other),
    Gradients(Box<Problem>, BackwardSetup),
    MultiHeadGradients(Box<LayerProblem>, LayerBackwardSetup),
}

type Cases = fn(&'static Profile) -> Vec<(String, Work)>;

/// All small cases, on the device of `profile`.
pub fn table(profile: &'static Profile) -> Vec<Small> {
    let kinds: [Cases; 6] =
        [attention::cases, masks::cases, caches::cases, layers::cases, others::cases, gradients::cases];
    let named = |(name, work)| Small { name, profile, work };
    kinds.into_iter().flat_map(|cases| cases(profile)).map(named).collect()
}

impl Small {
    /// Runs and judges the case. `report` records one run of it, or the reason for a skip.
    pub async fn run(&self, report: &mut Report) {
        let Small { name, profile, work } = self;
        match work {
            Work::Attention(case, setup, splits) => {
                let change = |kernel_options: wgpu_attention::KernelOptions| match splits {
                    Some(splits) => kernel_options.splits(*splits),
                    None => kernel_options,
                };
                report.check_async(case, setup, &mut Default::default(), change).await;
            }
            Work::Gradients(problem, setup) => report.check_backward_async(problem, setup).await,
            Work::MultiHeadGradients(problem, setup) => {
                report.check_layer_backward_async(problem, setup).await
            }
            Work::Layer(layer) => {
                report.check_layer_async(&layer.case, &layer.setup, &mut Default::default()).await;
            }
            Work::Cache(case) => report.record(name, &profile.name, case.run(profile).await),
            Work::Other(other) => report.record(name, &profile.name, other.run(profile, name).await),
        }
    }
}
