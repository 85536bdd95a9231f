use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::{Attention, Error, Forward, Linear, Mask, Projection, Scratch, TensorView, wgpu};

/// Projects `x` to queries, keys and values, then attends, in one pass of the application.
pub fn record(
    pass: &mut wgpu::ComputePass,
    (projection, attention, scratch): (&Projection, &Attention, &mut Scratch),
    x: TensorView,
    weights: [Linear; 3],
    [q, k, v, out]: [TensorView; 4],
) -> Result<(), Error> {
    let [to_q, to_k, to_v] = weights;
    let products = [(to_q, q), (to_k, k), (to_v, v)].map(|(w, to)| ProjectionForward::new(x, w, to));
    projection.forward(pass, &products)?;
    let call = Forward::new(q, k, v, out).mask(Mask::causal());
    attention.forward(pass, &call, scratch)
}
