//! A layer's weights for the reference, and a layer computed stage by stage.

use wgpu_attention::reference::{
    HostLinear, HostNorm, HostWeights, Real, attention, join_heads, project, split_heads, widen,
};

use super::layer::LayerCase;
use super::layer_options::LayerOptions;

/// The weights of a layer in the arithmetic of `R`, with a matrix for each head.
pub struct WideWeights<R> {
    /// Weight and bias of queries, keys, values, out.
    linears: [(Vec<R>, Option<Vec<R>>); 4],
    appended: Option<[Vec<R>; 2]>,
    /// Weight and bias of the norms of queries and of keys.
    norms: Option<[[Option<Vec<R>>; 2]; 2]>,
    gate: Option<(Vec<R>, Option<Vec<R>>)>,
}

impl<R> WideWeights<R> {
    pub fn host(&self) -> HostWeights<'_, R> {
        let [query, key, value, out] = self
            .linears
            .each_ref()
            .map(|(weight, bias)| HostLinear { weight: &weight[..], bias: bias.as_deref() });
        HostWeights {
            query,
            key,
            value,
            out,
            bias_kv: self.appended.as_ref().map(|pair| pair.each_ref().map(|x| &x[..])),
            qk_norm: self.norms.as_ref().map(|norms| {
                norms
                    .each_ref()
                    .map(|[weight, bias]| HostNorm { weight: weight.as_deref(), bias: bias.as_deref() })
            }),
            gate: self.gate.as_ref().map(|(weight, bias)| HostLinear { weight, bias: bias.as_deref() }),
        }
    }
}

impl LayerCase {
    pub fn wide_weights<R: Real>(&self) -> WideWeights<R> {
        let some = |x: &Option<Vec<f32>>| x.as_ref().map(|x| widen(x));
        let norms = self.norms.each_ref().map(|norm| [some(&norm.weight), some(&norm.bias)]);
        WideWeights {
            linears: std::array::from_fn(|n| (widen(&self.per_head(n)), some(&self.linears[n].bias))),
            appended: self.appended.as_ref().map(|pair| pair.each_ref().map(|x| widen(x))),
            norms: self.config.qk_norm.map(|_| norms),
            gate: self.gate.as_ref().map(|gate| {
                let (_, [heads, ..]) = self.gate_side().expect("the configuration has a gate");
                (widen(&self.repeated(&gate.weight, heads)), some(&gate.bias))
            }),
        }
    }

    /// Returns the output, computed stage by stage in f64, without a gate. `change` gets projected
    /// queries (side 0) and keys (1), and their heads, length and channels, before keys are
    /// appended.
    pub fn staged(&self, change: impl Fn(usize, Vec<f64>, [usize; 3]) -> Vec<f64>) -> Vec<f64> {
        let LayerOptions { heads, value_dim, out_features, add_zero_attn, .. } = self.config;
        let WideWeights { linears, appended, .. } = self.wide_weights::<f64>();
        let (q_len, kv_len) = (self.shape.q_len, self.shape.kv_len);
        let [q, k, v]: [Vec<f64>; 3] = std::array::from_fn(|n| {
            let (heads, dim, features) = self.sides()[n];
            let length = if n == 0 { q_len } else { kv_len };
            let (x, weight) = (widen::<f64>(&self.inputs[n]), widen::<f64>(&self.wide(n)));
            let bias = linears[n].1.as_deref();
            let mut y = project(&x, &weight, bias, features, heads * dim).expect("it fits");
            if n < 2 {
                y = change(n, y, [heads, length, dim]);
            }
            let mut all = Vec::new();
            for sequence in y.chunks_exact(length * heads * dim) {
                all.extend_from_slice(sequence);
                if n > 0 {
                    all.extend(appended.iter().flat_map(|pair| &pair[n - 1]));
                    all.extend(vec![0.0; usize::from(add_zero_attn) * heads * dim]);
                }
            }
            let rows = if n == 0 { q_len } else { kv_len + self.appended_len() };
            split_heads(&all, rows, heads, dim).expect("it fits")
        });
        let attended = attention(&q, &k, &v, self.attention(), &self.attention_options()).expect("it fits");
        let context = join_heads(&attended.out, q_len, heads, value_dim).expect("it fits");
        let (weight, bias) = &linears[3];
        project(&context, weight, bias.as_deref(), heads * value_dim, out_features).expect("it fits")
    }
}
