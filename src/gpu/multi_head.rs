//! A multi-head attention layer over slices.

use super::Gpu;
use super::upload::{LinearBuffers, Outputs, Uploaded, UploadedDropout, UploadedRotary};
use crate::kernel::Scratch;
use crate::kernel::guard::Watch;
use crate::layers::multi_head::config::{MultiHeadConfig, Side};
use crate::layers::multi_head::{MultiHeadAttention, MultiHeadForward, MultiHeadWeights, NORMS};
use crate::reference::{Attended, HostWeights, MultiHeadShape, Options};
use crate::rows::norm::NormWeights;
use crate::tensor::Error;

impl Gpu {
    /// Computes a multi-head attention layer. It takes the same types as
    /// [`reference::multi_head`](crate::reference::multi_head), so that results compare one to one.
    /// Scale and softcap come from the layer, not from `options`.
    ///
    /// It uploads the weights at each call. An application creates a [`MultiHeadAttention`] once
    /// instead.
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and weights that do not have the shapes of `config`.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn multi_head(
        &self,
        inputs: [&[f32]; 3],
        shape: MultiHeadShape,
        config: &MultiHeadConfig,
        weights: &HostWeights<f32>,
        options: &Options,
    ) -> Result<Attended<f32>, Error> {
        pollster::block_on(self.multi_head_async(inputs, shape, config, weights, options))
    }

    /// The async variant of [`multi_head`](Self::multi_head).
    ///
    /// # Errors
    /// As [`multi_head`](Self::multi_head).
    pub async fn multi_head_async(
        &self,
        inputs: [&[f32]; 3],
        shape: MultiHeadShape,
        config: &MultiHeadConfig,
        weights: &HostWeights<'_, f32>,
        options: &Options<'_>,
    ) -> Result<Attended<f32>, Error> {
        config.check()?;
        let MultiHeadShape { batch, q_len, kv_len } = shape;
        let sides = [
            ("query", &weights.query, config.side(Side::Query), q_len),
            ("key", &weights.key, config.side(Side::Key), kv_len),
            ("value", &weights.value, config.side(Side::Value), kv_len),
        ];
        let watch = Watch::begin(&self.device);
        let mut xs = Vec::new();
        let mut linears = Vec::new();
        for (x, (name, linear, side, length)) in inputs.into_iter().zip(sides) {
            xs.push(self.upload_shaped(name, x, [batch, 1, length, side.features])?);
            linears.push(LinearBuffers::new(self, linear, side.weight())?);
        }
        let width = config.heads * config.value_dim;
        linears.push(LinearBuffers::new(self, &weights.out, [1, 1, config.out_features, width])?);
        config.check_gate(weights.gate.is_some())?;
        if let Some((gate, side)) = weights.gate.as_ref().zip(config.gate_side()) {
            linears.push(LinearBuffers::new(self, gate, side.weight())?);
        }
        let appended = match weights.bias_kv {
            Some([k, v]) => {
                let [key, value] =
                    [config.head_dim, config.value_dim].map(|d| [1, 1, 1, config.kv_heads * d]);
                let k = self.upload_shaped("bias_k", k, key)?;
                Some([k, self.upload_shaped("bias_v", v, value)?])
            }
            None => None,
        };
        let norms = weights.qk_norm.as_ref().map(|norms| norms.each_ref().map(|n| [n.weight, n.bias]));
        let mut uploaded = Vec::new();
        for (name, x) in NORMS.into_iter().flatten().zip(norms.iter().flatten().flatten()) {
            let upload = |x: &&[f32]| self.upload_shaped(name, x, [1, 1, 1, config.head_dim]);
            uploaded.push(x.as_ref().map(upload).transpose()?);
        }
        let norm = |n: usize| NormWeights {
            weight: uploaded[2 * n].as_ref().map(Uploaded::view),
            bias: uploaded[2 * n + 1].as_ref().map(Uploaded::view),
        };
        let views = MultiHeadWeights {
            query: linears[0].view(),
            key: linears[1].view(),
            value: linears[2].view(),
            out: linears[3].view(),
            bias_kv: appended.as_ref().map(|[k, v]| [k.view(), v.view()]),
            qk_norm: norms.map(|_| [norm(0), norm(1)]),
            gate: linears.get(4).map(LinearBuffers::view),
        };
        let layer = MultiHeadAttention::with_pipelines(&self.pipelines, *config, &views)?;
        let appended = layer.appended_keys();
        let inner = config.shape(batch, q_len, kv_len, appended);
        inner.check()?;
        let rotary = UploadedRotary::new(self, options, [batch, q_len])?;
        Options { rotary: None, ..*options }.appended(appended).check(inner)?;
        let mask = self.upload_mask(&options.mask)?;
        let dropout = UploadedDropout::new(self, options)?;
        let weights = options.weights.then_some(inner);
        let out = Outputs::new(self, [batch, 1, q_len, config.out_features], Some(inner), weights)?;
        let call = MultiHeadForward::new(xs[0].view(), xs[1].view(), xs[2].view(), out.out.view())
            .mask(mask.view())
            .lse(out.lse.as_ref().map(Uploaded::view))
            .weights(out.weights.as_ref().map(Uploaded::view))
            .dropout(dropout.view(options))
            .rotary_of(rotary.as_ref().map(UploadedRotary::view));
        self.settle().await?;
        self.pipelines.with_fallbacks(|| {
            let mut scratch = Scratch::new(&self.device, layer.scratch_size(&call)?)?;
            self.submit(|encoder| layer.forward(encoder, &call, &mut scratch))
        })?;
        watch.end("the layer").await?;
        let attended = out.read(self).await;
        self.release((xs, linears, uploaded, mask, dropout, rotary, out, layer));
        attended
    }
}
