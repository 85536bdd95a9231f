//! Random layers, compared with the reference; see `property.rs`.

use wgpu_attention::DType;
use wgpu_attention::layers::OutputGate;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::rows::NormConfig;
use wgpu_attention::tuning::{Algorithm, Target};

use crate::harness::layer::{
    LayerCase, LayerLayout, LayerSetup, LinearData, NormData, Storage, run_layer_with,
};
use crate::harness::layer_options::LayerOptions;
use crate::harness::report::judge_outputs;
use crate::harness::rotary::RotaryData;
use crate::harness::{Expected, FORMS, Report, Rng, Weights, defaults, full};
use crate::laws::property::{Draws, DropDraw, MaskDraw, float, judged, profile, same_tile, seed, weights};

/// Everything random about a layer and its run.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    seed: u64,
    config: LayerOptions,
    shape: MultiHeadShape,
    one_input: bool,
    shared: bool,
    biases: [bool; 4],
    appended: bool,
    mask: MaskDraw,
    drop: DropDraw,
    profile: &'static str,
    form: Target,
    path: Algorithm,
    weight: DType,
    bias: DType,
    layout: LayerLayout,
    storage: Storage,
    lse: bool,
    weights: Weights,
    /// The seed of the norms of queries and keys, which a third of the draws has.
    norms: Option<u64>,
    /// The seed of the gate of the heads' outputs, which a third of the draws has.
    gate: Option<u64>,
}

impl Draw {
    pub fn random(seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x1a7e2);
        let kv_heads = rng.pick(&[1, 1, 2, 3]);
        let heads = kv_heads * rng.pick(&[1, 1, 2]);
        let narrow = rng.chance(0.35);
        let features = |rng: &mut Rng, heads: usize| {
            if narrow { heads * rng.pick(&[1, 3, 4, 8]) } else { rng.pick(&[1, 3, 4, 12, 16, 17, 33]) }
        };
        let dim = |rng: &mut Rng| rng.pick(&[1, 3, 4, 5, 8, 12, 17, 32]);
        let profile = profile(rng);
        let mut config = LayerOptions {
            heads,
            kv_heads,
            head_dim: dim(rng),
            value_dim: dim(rng),
            query_features: features(rng, heads),
            key_features: features(rng, kv_heads),
            value_features: features(rng, kv_heads),
            out_features: rng.pick(&[1, 4, 5, 16, 33]),
            narrow,
            add_zero_attn: rng.chance(0.25),
            qk_norm: None,
            output_gate: None,
            scale: rng.chance(0.2).then_some(0.5),
            softcap: rng.chance(0.15).then_some(3.0),
            dtype: float(rng),
        };
        let length = |rng: &mut Rng| rng.pick(&[1, 2, 3, 5, 8, 13, 16, 17, 33, 66]);
        let mut shape =
            MultiHeadShape { batch: rng.pick(&[1, 2, 3]), q_len: length(rng), kv_len: length(rng) };
        let one_input = rng.chance(0.3);
        if one_input {
            shape.kv_len = shape.q_len;
            config.query_features = config.query_features.next_multiple_of(heads * kv_heads);
            (config.key_features, config.value_features) = (config.query_features, config.query_features);
        }
        Draw {
            seed,
            config,
            shape,
            one_input,
            shared: narrow && rng.chance(0.3),
            biases: rng.pick(&[
                [true; 4],
                [false; 4],
                [true, false, true, false],
                [false, false, false, true],
            ]),
            appended: rng.chance(0.25),
            mask: MaskDraw::random(rng, shape.kv_len),
            drop: DropDraw::random(rng),
            profile: profile.name,
            form: rng.pick(&FORMS),
            path: rng.pick(&[Algorithm::Auto, Algorithm::Staged]),
            weight: float(rng),
            bias: float(rng),
            layout: match rng.below(4) {
                0 => LayerLayout::Dense,
                1 => LayerLayout::SeqFirst,
                _ => LayerLayout::Window(rng.word()),
            },
            storage: match rng.below(5) {
                0 => Storage::Separate,
                1 => Storage::OneBuffer { gap: 0 },
                2 => Storage::OneBuffer { gap: rng.between(1, 9) },
                3 => Storage::Transposed,
                _ => Storage::Window(rng.word()),
            },
            lse: rng.chance(0.5),
            weights: weights(rng),
            norms: Some(seed ^ 0x9b4).filter(|seed| Rng::new(*seed).chance(0.35)),
            gate: Some(seed ^ 0x6a7e).filter(|seed| Rng::new(*seed).chance(0.35)),
        }
    }

    /// Returns other lengths and data for the same shaders.
    pub fn again(mut self) -> Self {
        let rng = &mut Rng::new(self.seed ^ 0xa6a12);
        self.seed = rng.word();
        let shape = &mut self.shape;
        let tiles = |q_len: usize| (q_len * self.config.heads / self.config.kv_heads).div_ceil(8).min(5);
        let other = same_tile(shape.q_len, rng);
        shape.q_len = if tiles(other) == tiles(shape.q_len) { other } else { shape.q_len };
        shape.kv_len = if self.one_input { shape.q_len } else { same_tile(shape.kv_len, rng) };
        self
    }

    /// Adds norms of queries and keys, if they are drawn. A larger eps keeps norms of few channels
    /// smooth.
    fn normed(&self, case: LayerCase) -> LayerCase {
        let Some(seed) = self.norms else { return case };
        let rng = &mut Rng::new(seed);
        let centred = self.config.head_dim >= 8 && rng.chance(0.3);
        let config = if centred { NormConfig::layer() } else { NormConfig::rms() };
        let case = case.with_norms(if self.config.head_dim < 8 { config.eps(0.1) } else { config });
        let mut part = |t: Option<Vec<f32>>| t.filter(|_| rng.chance(0.7));
        let norms = case.norms.clone().map(|n| NormData { weight: part(n.weight), bias: part(n.bias) });
        LayerCase { norms, ..case }
    }

    /// Adds a gate of the heads' outputs, if it is drawn.
    fn gated(&self, case: LayerCase) -> LayerCase {
        let Some(seed) = self.gate else { return case };
        let rng = &mut Rng::new(seed);
        let kind = rng.pick(&[OutputGate::Elementwise, OutputGate::Headwise]);
        let mut case = case.with_gate(kind);
        case.gate.iter_mut().for_each(|gate| gate.bias = gate.bias.take().filter(|_| self.biases[0]));
        case
    }

    pub fn case(&self) -> LayerCase {
        let rng = &mut Rng::new(self.seed ^ 0x5eed);
        let config = self.config;
        let MultiHeadShape { batch, q_len, kv_len } = self.shape;
        let mut inputs = [
            rng.normals(batch * q_len * config.query_features),
            rng.normals(batch * kv_len * config.key_features),
            rng.normals(batch * kv_len * config.value_features),
        ];
        if self.one_input {
            inputs = [inputs[0].clone(), inputs[0].clone(), inputs[0].clone()];
        }
        let linears = [(); 4].map(|()| LinearData { weight: Vec::new(), bias: None });
        let mut case = LayerCase {
            name: format!("layer {:#x}", self.seed),
            config,
            shape: self.shape,
            inputs,
            one_input: self.one_input,
            linears,
            shared: self.shared,
            appended: None,
            norms: Default::default(),
            gate: None,
            rotary: None,
            rules: Default::default(),
            dropout: None,
            expected: Expected::default(),
        };
        for (n, [_, _, out, features]) in case.weight_shapes().into_iter().enumerate() {
            let heads = case.weight_shapes()[n][1];
            let scale = 1.0 / (features as f32).sqrt();
            let weight = rng.normals(heads * out * features).iter().map(|w| w * scale).collect();
            let rows = [
                config.heads * config.head_dim,
                config.kv_heads * config.head_dim,
                config.kv_heads * config.value_dim,
                config.out_features,
            ][n];
            case.linears[n] = LinearData { weight, bias: self.biases[n].then(|| rng.normals(rows)) };
        }
        if self.appended {
            let widths = [config.head_dim, config.value_dim].map(|dim| config.kv_heads * dim);
            case.appended = Some(widths.map(|n| rng.normals(n)));
        }
        let attention = case.attention();
        case.rules = self.mask.rules(rng, &attention, case.appended_len());
        case.dropout = self.drop.dropout(rng, attention.weights());
        if q_len == kv_len && rng.chance(0.5) {
            case.rotary = RotaryData::random(rng, [batch, q_len, config.head_dim]);
        }
        self.gated(self.normed(case))
    }

    pub fn setup(&self) -> LayerSetup {
        let Draw { form, path, weight, bias, layout, storage, lse, weights, .. } = *self;
        let profile = if self.profile == "full" { full() } else { defaults() };
        let dtype = self.config.dtype;
        LayerSetup { profile, form, path, dtype, weight, bias, layout, storage, lse, weights }
    }

    fn outcome(&self) -> Result<f64, String> {
        let setup = self.setup();
        let stored = self.case().stored(&setup);
        let truth = stored.truth(&setup);
        run_layer_with(&stored, &setup, |layer| layer)
            .and_then(|got| judge_outputs(&stored.expected, stored.attention(), &truth, &got, false))
    }

    fn simpler(&self) -> Vec<Self> {
        let mut all: Vec<Self> = self.mask.simpler().into_iter().map(|mask| Draw { mask, ..*self }).collect();
        let less: [fn(&mut Self); 24] = [
            |d| d.shape.batch = 1,
            |d| d.shape.q_len = if d.one_input { d.shape.q_len } else { 1 },
            |d| d.shape.kv_len = if d.one_input { d.shape.kv_len } else { 1 },
            |d| (d.shape.q_len, d.shape.kv_len) = (d.shape.q_len.div_ceil(2), d.shape.kv_len.div_ceil(2)),
            |d| (d.config.heads, d.config.kv_heads) = (1, 1),
            |d| d.config.heads = d.config.kv_heads,
            |d| d.config.head_dim = 1,
            |d| d.config.value_dim = 1,
            |d| d.config.out_features = 1,
            |d| d.config.add_zero_attn = false,
            |d| (d.config.scale, d.config.softcap) = (None, None),
            |d| d.config.dtype = DType::F32,
            |d| d.one_input = false,
            |d| d.shared = false,
            |d| d.biases = [false; 4],
            |d| d.appended = false,
            |d| d.drop = DropDraw::None,
            |d| d.norms = None,
            |d| d.gate = None,
            |d| d.weight = DType::F32,
            |d| d.bias = DType::F32,
            |d| d.layout = LayerLayout::Dense,
            |d| d.storage = Storage::Separate,
            |d| (d.lse, d.weights) = (false, Weights::None),
        ];
        for change in less {
            let mut draw = *self;
            change(&mut draw);
            all.push(draw);
        }
        all.retain(|draw| format!("{draw:?}") != format!("{self:?}"));
        all
    }
}

#[test]
fn random_layers_match_the_reference() {
    crate::harness::in_turn!();
    let seed = seed();
    let mut report = Report::new("property of layers");
    for n in (Draws { name: "property of layers", always: 40, most: 120, group: 4 }).numbers() {
        let draw = (0..n % 4).fold(Draw::random(seed.wrapping_add(n as u64 / 4)), |draw, _| draw.again());
        let outcome = judged(&report, draw, Draw::simpler, Draw::outcome);
        report.record(&format!("layer {n}"), &draw.setup(), outcome);
    }
    report.finish();
}
