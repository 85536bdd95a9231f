//! Small cases of what stands around attention: embeddings, means of rows, logits.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{self, widen};
use wgpu_attention::{
    DType, Embedding, EmbeddingBackward, EmbeddingForward, Error, LogSoftmax, LogSoftmaxBackward,
    LogSoftmaxForward, MeanPool, MeanPoolBackward, MeanPoolForward, PooledRows, Scratch, TopK, TopKForward,
};

use super::case::{Judged, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

fn normals(name: &str, n: usize, dtype: DType) -> Vec<f32> {
    stored(&Rng::named(name).normals(n), dtype)
}

fn placed(profile: &Profile, values: Values, dtype: DType, shape: [usize; 4]) -> Placed {
    let [at] = Layout::Window(7).places([shape]);
    Placed::input(profile, values, dtype, at)
}

fn output(profile: &Profile, dtype: DType, shape: [usize; 4]) -> Placed {
    let [at] = Layout::Window(7).places([shape]);
    Placed::output(profile, dtype, at)
}

/// The error over the tolerance of sums of up to `terms` terms of normal variables.
async fn judged(
    profile: &Profile,
    got: &Placed,
    (exact, naive, dtype): (Vec<f64>, Vec<f32>, DType),
    terms: f64,
) -> Result<f64, String> {
    let tolerance = Tolerance::gradient(&widened(&naive, dtype), &exact, 4.0 * terms, EPSILON_F32);
    Judged { want: exact, tolerance }.judge(&got.download_async("a result", profile).await?)
}

fn refused(error: Error) -> String {
    error.to_string()
}

/// Rows of a table, and its gradient.
pub async fn embedding(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (rows, width) = (9, 14);
    let ids: Vec<u32> = vec![3, 0, 8, 3, 9, u32::MAX, 3, 1, 0, 5];
    let table = normals("a table of embeddings", rows * width, dtype);
    let d_out = normals("gradients of embeddings", ids.len() * width, dtype);
    let [ids_at, table_at, d_out_at] = [
        placed(profile, Values::Numbers(&ids), DType::U32, [2, 1, 5, 1]),
        placed(profile, Values::Floats(&table), dtype, [1, 1, rows, width]),
        placed(profile, Values::Floats(&d_out), dtype, [2, 1, 5, width]),
    ];
    let out = output(profile, dtype, [2, 1, 5, width]);
    let d_table = output(profile, dtype, [1, 1, rows, width]);
    let operator = Embedding::with_pipelines(profile.gpu.pipelines());
    let forward = EmbeddingForward::new(ids_at.view(), table_at.view(), out.view()).scale(1.5);
    let backward = EmbeddingBackward::new(ids_at.view(), d_out_at.view(), d_table.view()).scale(1.5);
    let size = operator.backward_scratch_size(&backward).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;
    let exact = reference::embedding(&ids, &widen::<f64>(&table), width, 1.5).map_err(refused)?;
    let naive = reference::embedding(&ids, &table, width, 1.5).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, dtype), 1.0).await?;
    let shape = [rows, width];
    let exact = reference::embedding_backward(&ids, &widen::<f64>(&d_out), shape, 1.5).map_err(refused)?;
    let naive = reference::embedding_backward(&ids, &d_out, shape, 1.5).map_err(refused)?;
    Ok(worst.max(judged(profile, &d_table, (exact, naive, dtype), 4.0).await?))
}

/// Means of masked rows, divided by their length, and the gradient.
pub async fn mean_pool(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (length, features) = (7, 22);
    let keep: Vec<bool> = (0..2 * length).map(|n| n % 3 != 1).collect();
    let x = normals("rows to average", 2 * length * features, dtype);
    let d_out = normals("gradients of means", 2 * features, dtype);
    let [x_at, keep_at, d_out_at] = [
        placed(profile, Values::Floats(&x), dtype, [2, 1, length, features]),
        placed(profile, Values::Bools(&keep), DType::Bool, [2, 1, 1, length]),
        placed(profile, Values::Floats(&d_out), dtype, [2, 1, 1, features]),
    ];
    let out = output(profile, dtype, [2, 1, 1, features]);
    let d_x = output(profile, dtype, [2, 1, length, features]);
    let operator = MeanPool::with_pipelines(profile.gpu.pipelines());
    let forward = MeanPoolForward::new(x_at.view(), PooledRows::Keep(keep_at.view()), out.view()).l2(true);
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &MeanPoolBackward::new(forward, d_out_at.view(), d_x.view()))
    });
    recorded.map_err(refused)?;
    let of = |b: usize| (b * length..(b + 1) * length).filter(|row| keep[*row]).collect();
    let sequences: [Vec<usize>; 2] = [of(0), of(1)];
    let wide = widen::<f64>(&x);
    let exact = reference::mean_pool(&wide, features, &sequences, true).map_err(refused)?;
    let naive = reference::mean_pool(&x, features, &sequences, true).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, dtype), 1.0).await?;
    let d = widen::<f64>(&d_out);
    let exact = reference::mean_pool_backward(&wide, features, &sequences, true, &d).map_err(refused)?;
    let naive = reference::mean_pool_backward(&x, features, &sequences, true, &d_out).map_err(refused)?;
    Ok(worst.max(judged(profile, &d_x, (exact, naive, dtype), 1.0).await?))
}

/// Log-softmax and its gradient, and the five largest.
pub async fn logits(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let columns = 70;
    let shape = [2, 1, 3, columns];
    let x = normals("logits", 6 * columns, dtype);
    let d_out = normals("gradients of logits", 6 * columns, dtype);
    let x_at = placed(profile, Values::Floats(&x), dtype, shape);
    let d_out_at = placed(profile, Values::Floats(&d_out), dtype, shape);
    let [out, d_x] = [(); 2].map(|()| output(profile, DType::F32, shape));
    let indices = output(profile, DType::U32, [2, 1, 3, 5]);
    let soft = LogSoftmax::with_pipelines(profile.gpu.pipelines());
    let top = TopK::with_pipelines(profile.gpu.pipelines());
    let recorded = profile.gpu.submit(|e| {
        soft.forward(e, &LogSoftmaxForward::new(x_at.view(), out.view()))?;
        soft.backward(e, &LogSoftmaxBackward::new(out.view(), d_out_at.view(), d_x.view()))?;
        top.forward(e, &TopKForward::new(x_at.view(), indices.view()))
    });
    recorded.map_err(refused)?;
    let exact = reference::log_softmax(&widen::<f64>(&x), columns).map_err(refused)?;
    let naive = reference::log_softmax(&x, columns).map_err(refused)?;
    let d = widen::<f64>(&d_out);
    let exact_d = reference::log_softmax_backward(&exact, columns, &d).map_err(refused)?;
    let naive_d = reference::log_softmax_backward(&naive, columns, &d_out).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, DType::F32), 2.0).await?;
    let worst = worst.max(judged(profile, &d_x, (exact_d, naive_d, DType::F32), 4.0).await?);
    let want = reference::top_k(&x, columns, 5).map_err(refused)?;
    let got = indices.download_async("indices", profile).await?;
    if got.iter().copied().eq(want.iter().map(|n| f64::from(*n))) {
        return Ok(worst);
    }
    Err(format!("the largest are at {got:?}, not {want:?}"))
}
