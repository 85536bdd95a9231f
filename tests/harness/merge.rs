//! Attention over parts of the keys, merged and judged as attention over all keys.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Attention, Config, DType, Forward, KernelOptions, Scratch, Shape};

use super::case::{Case, Weights};
use super::device::Profile;
use super::memory::{Place, Values};
use super::random::Rng;
use super::run::{Placed, window};

/// The split and the storage of a case.
pub struct Cut<'a> {
    pub profile: &'static Profile,
    pub path: Algorithm,
    /// The types of the parts' outputs and of the merged output.
    pub dtypes: [DType; 2],
    /// The first keys of all parts after the first part.
    pub at: &'a [usize],
}

/// Returns the largest error over tolerance of attention to the parts, merged.
pub async fn merged(case: &Case, cut: &Cut<'_>) -> Result<f64, String> {
    let Shape { q_len, kv_len, head_dim, value_dim, heads, kv_heads, .. } = case.shape;
    let Cut { profile, path, dtypes: [part, into], at } = *cut;
    let mut rng = Rng::named(&case.name);
    let mut place = |shape| window(shape, &mut rng, 3);
    let shape = case.shape;
    let mut input = |x, shape| Placed::input(profile, Values::Floats(x), part, place(shape));
    let (q, k, v) = (input(&case.q, shape.q()), input(&case.k, shape.k()), input(&case.v, shape.v()));
    let keep =
        case.rules.attn_mask.as_ref().map(|keep| {
            Placed::input(profile, Values::Bools(&keep.data), DType::Bool, Place::dense(keep.shape))
        });
    let config = Config::new(heads, head_dim)
        .kv_heads(kv_heads)
        .value_dim(value_dim)
        .dtype(part)
        .kernel_options(KernelOptions::new().algorithm(path));
    let device = profile.gpu.device();
    let attention = Attention::with_pipelines(profile.gpu.pipelines(), config).map_err(|e| e.to_string())?;
    let ends: Vec<usize> = at.iter().copied().chain([kv_len]).collect();
    let starts = std::iter::once(0).chain(at.iter().copied());
    let ranges: Vec<(usize, usize)> = starts.zip(ends).collect();
    let outputs: Vec<[Placed; 2]> = ranges
        .iter()
        .map(|_| {
            [
                Placed::output(profile, part, place(shape.out())),
                Placed::output(profile, DType::F32, place(shape.lse())),
            ]
        })
        .collect();
    for ((start, end), [out, lse]) in ranges.iter().zip(&outputs) {
        let [k, v] = [&k, &v].map(|t| t.view().slice(2, *start, end - start));
        let mut call = Forward::new(q.view(), k, v, out.view()).lse(lse.view());
        if let Some(keep) = &keep {
            call = call.mask(DeviceMask::none().attn_mask(keep.view().slice(3, *start, end - start)));
        }
        let size = attention.scratch_size(&call).map_err(|e| e.to_string())?;
        let mut scratch = Scratch::new(device, size).map_err(|e| e.to_string())?;
        profile.gpu.submit(|e| attention.forward(e, &call, &mut scratch)).map_err(|e| e.to_string())?;
    }
    let all = [
        Placed::output(profile, into, place(shape.out())),
        Placed::output(profile, DType::F32, place(shape.lse())),
    ];
    let parts: Vec<Partial> =
        outputs.iter().map(|[out, lse]| Partial { out: out.view(), lse: lse.view() }).collect();
    let target = Partial { out: all[0].view(), lse: all[1].view() };
    let merge = Merge::with_pipelines(profile.gpu.pipelines());
    let call = MergeForward::new(&parts, target);
    profile.gpu.submit(|e| merge.forward(e, &call)).map_err(|e| e.to_string())?;

    // Every part is rounded once, and the merged output once.
    let truth = case.truth(if part == DType::F32 { into } else { part }, Weights::None);
    let lse =
        truth.lse.judge(&all[1].download_async("lse", profile).await?).map_err(|e| format!("lse: {e}"))?;
    let out =
        truth.out.judge(&all[0].download_async("out", profile).await?).map_err(|e| format!("out: {e}"))?;
    assert_eq!(truth.out.want.len(), shape.batch * heads * q_len * value_dim);
    Ok(out.max(lse))
}
