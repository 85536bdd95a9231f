//! Attentional vectors: forward and backward runs, compared with the reference.

use wgpu_attention::layers::{AttentionalBackward, AttentionalForward, AttentionalVector};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{HostLinear, attentional, attentional_backward, widen};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Linear, Scratch};

use super::case::{Judged, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

/// Returns the largest error over tolerance, forward and backward.
pub async fn outcome_async(
    [batch, length, c, h, out]: [usize; 5],
    dtype: DType,
    layout: Layout,
    form: Target,
    accumulates: bool,
    profile: &'static Profile,
) -> Result<f64, String> {
    let rows = batch * length;
    let rng = &mut Rng::new(rows as u64 ^ 0x1009);
    let mut normals = |n: usize, scale: f32| -> Vec<f32> {
        stored(&rng.normals(n).iter().map(|x| x * scale).collect::<Vec<_>>(), dtype)
    };
    let narrow = 1.0 / ((c + h) as f32).sqrt();
    let given =
        [normals(rows * c, 1.0), normals(rows * h, 1.0), normals(out * (c + h), narrow), normals(out, 0.5)];
    let d_out = normals(rows * out, 1.0);
    let shapes = [[batch, 1, length, c], [batch, 1, length, h], [1, 1, out, c + h], [1, 1, 1, out]];
    let places = layout.places([
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
        [batch, 1, length, out],
        [batch, 1, length, out],
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
    ]);
    let placed: Vec<_> =
        (0..4).map(|n| Placed::input(profile, Values::Floats(&given[n]), dtype, places[n])).collect();
    let [context, hidden, weight, bias] = [0, 1, 2, 3].map(|n| placed[n].view());
    let result = Placed::output(profile, dtype, places[4]);
    let d_placed = Placed::input(profile, Values::Floats(&d_out), dtype, places[5]);
    let before: Vec<Vec<f32>> = given.iter().map(|x| normals(x.len(), 1.0)).collect();
    let gradients: Vec<_> = (0..4)
        .map(|n| match accumulates {
            true => Placed::holding(profile, &before[n], DType::F32, places[6 + n]),
            false => Placed::output(profile, DType::F32, places[6 + n]),
        })
        .collect();
    let operator = AttentionalVector::with_pipelines(profile.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form));
    let linear = Linear { weight, bias: Some(bias) };
    let forward = AttentionalForward::new(context, hidden, linear, result.view());
    let backward = AttentionalBackward::new(forward, d_placed.view())
        .d_context(gradients[0].view())
        .d_hidden(gradients[1].view())
        .d_weight(gradients[2].view())
        .d_bias(gradients[3].view())
        .accumulate(accumulates);
    let refused = |e: wgpu_attention::Error| e.to_string();
    let size = operator.scratch_size(&forward).map_err(refused)?;
    let size = size.max(operator.backward_scratch_size(&backward).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    profile
        .gpu
        .submit(|e| {
            operator.forward(e, &forward, &mut scratch)?;
            operator.backward(e, &backward, &mut scratch)
        })
        .map_err(refused)?;
    let read = async |placed: &Placed| placed.download_async("a result", profile).await;

    let wide: Vec<Vec<f64>> = given.iter().map(|x| widen(x)).collect();
    let exact = HostLinear { weight: &wide[2][..], bias: Some(&wide[3]) };
    let naive = HostLinear { weight: &given[2][..], bias: Some(&given[3]) };
    let want = attentional(&wide[0], &wide[1], exact, rows, out).map_err(refused)?;
    let close = attentional(&given[0], &given[1], naive, rows, out).map_err(refused)?;
    let mut worst = Judged::new(&widened(&close, dtype), want, 1.0).judge(&read(&result).await?)?;
    // From the output as stored: tanh's slope is 1 − out².
    let of = |x: &[f64], d: &[f64]| -> Vec<f64> { x.iter().zip(d).map(|(a, b)| a + b).collect() };
    let want = attentional_backward(&wide[0], &wide[1], exact, &widen(&d_out), rows, out).map_err(refused)?;
    let close = attentional_backward(&given[0], &given[1], naive, &d_out, rows, out).map_err(refused)?;
    let wants = [want.d_context, want.d_hidden, want.d_weight, want.d_bias];
    let closes = [close.d_context, close.d_hidden, close.d_weight, close.d_bias];
    let terms = [out, out, rows, rows];
    for n in 0..4 {
        let mut want = wants[n].clone();
        let mut naive = widened(&closes[n], DType::F32);
        if accumulates {
            want = of(&want, &widen(&before[n]));
            naive = of(&naive, &widen(&before[n]));
        }
        // Terms are products of numbers of about 4 at most. A narrower output is off by half a unit
        // in the last place.
        let rounding = match dtype {
            DType::F16 => 4.9e-4,
            DType::BF16 => 3.9e-3,
            _ => 0.0,
        };
        let mut tolerance = Tolerance::gradient(&naive, &want, 16.0 * terms[n] as f64, EPSILON_F32);
        tolerance.absolute += rounding * 2.0 * 16.0 * (terms[n] as f64).sqrt();
        worst = worst.max(
            Judged { want, tolerance }.judge(&read(&gradients[n]).await?).map_err(|e| format!("{n}: {e}"))?,
        );
    }
    Ok(worst)
}
