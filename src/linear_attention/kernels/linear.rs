//! The parts that the kernels of linear attention share: parameters, and WGSL that reads and writes
//! their tensors.

use std::borrow::Cow;

use crate::kernel::{Declared, FLOATS, Field, Kernel, Shared, Table, WIDTHS, Width, params, shader};
use crate::linear_attention::feature_map::RandomFeatures;
use crate::linear_attention::plan::LinearTiles;
use crate::mask::mods::{FeatureMod, Interned};
use crate::tensor::DType;

params! {
    /// The numbers of all kernels of linear attention, flat in the `Params` of each kernel.
    pub(crate) struct LinearNumbers {
        heads: u32,
        kv_heads: u32,
        /// Query heads of a key/value head.
        group: u32,
        features: u32,
        q_len: u32,
        kv_len: u32,
        value_dim: u32,
        chunk_len: u32,
        /// The first chunk of the span.
        first_slot: u32,
        slots: u32,
        /// The number of chunks of all keys of the call.
        all_slots: u32,
        /// The number of packed sequences, plus two for the rows before and after them. 0 without
        /// packing.
        sequences: u32,
        /// Floats of a row of a state: the values, then a vec4 whose first element is the norm.
        state_stride: u32,
        /// 1 if gradients are added to the contents of their tensors.
        accumulates: u32,
        /// 1 if sequences continue from a state of the caller.
        has_state: u32,
        eps: f32,
        /// Factor of results that are not divided by the norm.
        scale: f32,
        /// −∞.
        neg_inf: f32,
        head_dim: u32,
        /// Directions of random features.
        direction_count: u32,
        /// The exponent of the power of 2 that divides values before they are summed. Sums can
        /// exceed f32's range even if means do not.
        value_exponent: u32,
        /// 2 to the power of value_exponent.
        value_scale: f32,
    }
}

impl Shared for LinearNumbers {
    const WGSL: &'static str = "LinearNumbers";
    const MEMBERS: &'static [Field] = Self::FIELDS;
}

/// The function that makes a feature of an element when a kernel loads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phi {
    Identity,
    Elu,
    Relu,
    /// A function of the caller.
    Custom(Interned),
}

/// A feature map, as `FeatureMod` stores it, for the list of kernels.
const LISTED: &str = "fn feature_map(x: f32) -> f32 { return log(1.0 + exp(x)); }";

impl Phi {
    /// Returns one map of each kind.
    pub fn all() -> Vec<Self> {
        let own = FeatureMod::new(LISTED).ok().map(|own| Phi::Custom(own.0));
        [Some(Phi::Identity), Some(Phi::Elu), Some(Phi::Relu), own].into_iter().flatten().collect()
    }

    /// Returns the WGSL of the feature and its slope, for four elements. NaN stays NaN.
    pub(super) fn text(self) -> Cow<'static, str> {
        let text = match self {
            Phi::Custom(own) => return custom(own).into(),
            Phi::Identity => {
                "fn phi4(x: vec4<f32>) -> vec4<f32> { return x; }\n\
                 fn phi_slope4(x: vec4<f32>) -> vec4<f32> { return vec4<f32>(1.0); }\n"
            }
            Phi::Elu => {
                "fn phi4(x: vec4<f32>) -> vec4<f32> { return select(x + 1.0, exp(x), x <= vec4<f32>()); }\n\
                 fn phi_slope4(x: vec4<f32>) -> vec4<f32> { return select(vec4<f32>(1.0), exp(x), x <= vec4<f32>()); }\n"
            }
            Phi::Relu => {
                "fn phi4(x: vec4<f32>) -> vec4<f32> { return select(x, vec4<f32>(), x <= vec4<f32>()); }\n\
                 fn phi_slope4(x: vec4<f32>) -> vec4<f32> { return select(vec4<f32>(1.0), vec4<f32>(), x <= vec4<f32>()); }\n"
            }
        };
        text.into()
    }
}

/// Returns the WGSL of a feature map of the caller, and of its slope if it has one. The caller
/// writes it as a score function, so the generated code passes a pair.
fn custom(own: Interned) -> String {
    // The bits of a variable: WGSL rejects an infinite constant.
    let (prefix, source) = (own.prefix(), own.source());
    let members: String = own.members().map(|(name, ty, _)| format!("    {name}: {ty},\n")).collect();
    let pair: Vec<String> = own.members().map(|(_, ty, _)| format!("{ty}()")).collect();
    let each = |function: &str, name: &str| {
        let one = |c: char| format!("{prefix}_{function}(x.{c}, pair)");
        let four: Vec<String> = "xyzw".chars().map(one).collect();
        format!(
            "fn {name}(x: vec4<f32>) -> vec4<f32> {{\n    let pair = {prefix}_At({});\n    return vec4<f32>({});\n}}\n",
            pair.join(", "),
            four.join(", ")
        )
    };
    let slope = match &source.slope {
        Ok(slope) => format!("{slope}{}", each("slope", "phi_slope4")),
        Err(_) => String::new(),
    };
    format!(
        "fn {prefix}_neg_inf() -> f32 {{ var bits = 0xff800000u; return bitcast<f32>(bits); }}\nstruct {prefix}_At {{\n{members}}}\n{}{}{slope}",
        source.value,
        each("value", "phi4")
    )
}

/// The properties that most of the kernels have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearForm {
    pub tiles: LinearTiles,
    pub causal: bool,
    /// True if keys have logarithmic weights.
    pub scaled: bool,
    /// True if the call packs several sequences.
    pub packed: bool,
}

impl LinearForm {
    /// Returns the type of chunks, if they are in a table.
    pub fn chunks(&self) -> Option<DType> {
        (self.scaled || self.packed).then_some(DType::U32)
    }

    /// Returns the type of the logarithmic weights of keys, if there are any.
    pub fn logs(&self) -> Option<DType> {
        self.scaled.then_some(DType::F32)
    }

    /// Returns every combination of properties, each with a width.
    pub fn all() -> impl Iterator<Item = (Self, Width)> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            [false, true].into_iter().flat_map(move |causal| {
                [(false, false), (true, false), (false, true), (true, true)].into_iter().map(
                    move |(scaled, packed)| {
                        (LinearForm { tiles, causal, scaled, packed }, Width::of(scaled == packed))
                    },
                )
            })
        })
    }

    /// Returns the variant that the list of kernels varies.
    pub fn plain() -> Self {
        LinearForm { tiles: LinearTiles::ALL[0], causal: true, scaled: false, packed: false }
    }
}

const STATE_BEFORE: &str = "fn state_at(b: u32, kv: u32, slot: u32, chunk: Chunk) -> u32 {\n    \
        return ((b * p.kv_heads + kv) * p.slots + slot) * p.features * p.state_stride;\n}\n";
const STATE_TOTAL: &str = "fn state_at(b: u32, kv: u32, slot: u32, chunk: Chunk) -> u32 {\n    \
        return (chunk.sequence * p.kv_heads + kv) * p.features * p.state_stride;\n}\n";
const LOG_AT: &str =
    "fn log_at(b: u32, kv: u32, j: u32) -> f32 { return logs_at((b * p.kv_heads + kv) * p.kv_len + j); }\n";
const NO_LOG_AT: &str = "fn log_at(b: u32, kv: u32, j: u32) -> f32 { return 0.0; }\n";

/// The builder of a kernel: its declarations and its WGSL.
pub(super) struct Pieces {
    form: LinearForm,
    declared: Declared,
    texts: Vec<Cow<'static, str>>,
}

impl Pieces {
    /// Begins a kernel that reads tensors of the given width.
    pub fn new(form: LinearForm, width: Width, declared: Declared) -> Self {
        let LinearTiles { workgroup, lanes, rows } = form.tiles;
        let declared = declared
            .u32("WORKGROUP", workgroup)
            .u32("COLUMN_LANES", lanes)
            .u32("ROWS", rows)
            .bool("IS_CAUSAL", form.causal)
            .bool("IS_SCALED", form.scaled)
            .bool("IN_FOURS", width == Width::Four);
        let texts =
            [shader!("tensor/view"), shader!("linear_attention/chunks"), shader!("linear_attention/hidden")];
        Pieces { form, declared, texts: texts.map(Cow::from).into() }
    }

    pub fn bool(self, name: &'static str, value: bool) -> Self {
        Pieces { declared: self.declared.bool(name, value), ..self }
    }

    pub fn text(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        self.texts.push(text.into());
        self
    }

    /// Adds `function(b, h, i, c)`, which returns four channels of a tensor of the caller, zeros
    /// past the last channel.
    pub fn tensor(self, name: &str, function: &str, end: &str, wraps: [&str; 2]) -> Self {
        let [open, close] = wraps;
        self.text(format!(
            "fn {function}(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> {{\n    \
                let o = view_at(p.{name}, b, h, i, c);\n    \
                if IN_FOURS {{\n        return {open}{name}_at4(o, 1u, 4u){close};\n    }} else {{\n        \
                let n = {end} - c;\n        \
                return select(vec4<f32>(), {open}{name}_at4(o, p.{name}.strides.w, n){close}, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(n));\n    }}\n}}\n"
        ))
    }

    pub fn phi(self, phi: Phi) -> Self {
        self.text(phi.text())
    }

    pub fn queries(self) -> Self {
        self.tensor("q", "query_feature4", "p.features", ["phi4(", ")"])
    }

    pub fn keys(self) -> Self {
        self.tensor("k", "key_feature4", "p.features", ["phi4(", ")"])
    }

    pub fn values(self) -> Self {
        self.tensor("v", "value4", "p.value_dim", ["", ""])
    }

    pub fn d_out(self) -> Self {
        self.tensor("d_out", "d_out4", "p.value_dim", ["", ""])
    }

    /// Adds the slope of φ at an element of `q` or `k`. If φ is the identity, the tensor is absent.
    pub fn slope(self, of: &str, phi: Phi) -> Self {
        if phi == Phi::Identity {
            return self
                .text("fn slope4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return vec4<f32>(1.0); }\n");
        }
        self.tensor(of, "slope4", "p.features", ["phi_slope4(", ")"])
    }

    /// Adds the loads of states: before each chunk if causal, else of sequences.
    pub fn states(self) -> Self {
        let at = if self.form.causal { STATE_BEFORE } else { STATE_TOTAL };
        self.text(at).text("fn state4(o: u32) -> vec4<f32> { return states_at4(o, 1u, 4u); }\n")
    }

    pub fn stats(self) -> Self {
        self.text(
            "fn stats_of(b: u32, h: u32, i: u32) -> vec4<f32> {\n    \
             return stats_at4(((b * p.heads + h) * p.q_len + i) * 4u, 1u, 4u);\n}\n",
        )
    }

    /// Adds the chunks, and the logarithmic weights of keys if the kernel reads them. Without a
    /// table, `rows_len` is the number of rows.
    pub fn chunks(self, logs: Option<DType>, rows_len: &str) -> Self {
        match self.form.chunks() {
            Some(_) => self
                .text(if logs.is_some() { LOG_AT } else { NO_LOG_AT })
                .text(shader!("linear_attention/table")),
            None => self
                .text(shader!("linear_attention/no_table"))
                .text(format!("fn rows_len() -> u32 {{ return {rows_len}; }}\n")),
        }
    }

    /// Adds the tile of an invocation.
    pub fn product(self) -> Self {
        self.text(shader!("linear_attention/tile"))
    }

    /// Adds the logarithms of the rows of a tile.
    pub fn row_logs(self) -> Self {
        self.text(shader!("linear_attention/row_logs"))
    }

    /// Adds the stores to `written`, whose rows have `columns` columns.
    pub fn store(self, columns: &str) -> Self {
        self.text(shader!("linear_attention/store"))
            .text(format!("fn row_end() -> u32 {{ return {columns}; }}\n"))
    }

    pub fn kernel(self) -> Kernel {
        let texts: Vec<&str> = self.texts.iter().map(|text| text.as_ref()).collect();
        self.declared.kernel(&texts, self.form.tiles.workgroup, 0)
    }
}

/// Returns a variant for each combination of properties, then for each type and each φ of one
/// combination.
pub(super) fn listed<T>(of: impl Fn(LinearForm, Width, DType, Phi) -> T) -> Vec<T> {
    let plain = LinearForm::plain();
    let forms = LinearForm::all().map(|(form, width)| of(form, width, DType::F32, Phi::Elu));
    let typed = FLOATS.into_iter().flat_map(|dtype| WIDTHS.map(|width| of(plain, width, dtype, Phi::Elu)));
    let mapped = Phi::all().into_iter().map(|phi| of(plain, Width::Four, DType::F32, phi));
    forms.chain(typed).chain(mapped).collect()
}

/// Returns the tiles, types of rows and widths of the products with random directions: every
/// combination.
pub(super) fn listed_of_rows() -> impl Iterator<Item = (LinearTiles, DType, Width)> {
    LinearTiles::ALL.into_iter().flat_map(|tiles| {
        FLOATS.into_iter().flat_map(move |dtype| WIDTHS.map(move |width| (tiles, dtype, width)))
    })
}

/// The most rows of a head along x of a dispatch; further rows are along y.
pub(crate) const ROWS_EACH: usize = 1024;

impl Pieces {
    pub fn of_rows(tiles: LinearTiles, width: Width, declared: Declared) -> Self {
        Pieces::new(LinearForm { tiles, causal: false, scaled: false, packed: false }, width, declared)
    }
}

/// The kinds of random features that kernels distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Randoms {
    Positive,
    Hyperbolic,
    Trigonometric,
    Relu,
    Fourier,
}

impl Randoms {
    pub const ALL: [Randoms; 5] =
        [Randoms::Positive, Randoms::Hyperbolic, Randoms::Trigonometric, Randoms::Relu, Randoms::Fourier];

    pub fn of(kind: RandomFeatures) -> Self {
        match kind {
            RandomFeatures::Positive => Randoms::Positive,
            RandomFeatures::Hyperbolic => Randoms::Hyperbolic,
            RandomFeatures::Trigonometric => Randoms::Trigonometric,
            RandomFeatures::Relu { .. } => Randoms::Relu,
            RandomFeatures::Fourier => Randoms::Fourier,
        }
    }

    /// Returns the factor of the squared length of a row in the logarithm of its features.
    pub(super) fn half_square(self) -> &'static str {
        match self {
            Randoms::Positive | Randoms::Hyperbolic => "-0.5",
            Randoms::Trigonometric => "0.5",
            _ => "0.0",
        }
    }

    /// Returns the WGSL of the largest logarithm of a row's features.
    pub(super) fn largest(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn largest_log(first: u32, factor: f32) -> f32 {\n    \
                    var largest = p.neg_inf;\n    \
                    for (var n = 0u; n < p.direction_count; n++) { largest = max(largest, row_features_at(first + n) * factor); }\n    \
                    return largest;\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn largest_log(first: u32, factor: f32) -> f32 {\n    \
                    var largest = 0.0;\n    \
                    for (var n = 0u; n < p.direction_count; n++) { largest = max(largest, abs(row_features_at(first + n) * factor)); }\n    \
                    return largest;\n}\n"
            }
            _ => "fn largest_log(first: u32, factor: f32) -> f32 { return 0.0; }\n",
        }
    }

    /// Returns the WGSL that replaces the n-th product by its features. `p.eps` is the factor of
    /// the features; for ReLU it is added to each.
    pub(super) fn features(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    row_features_store(first + n, exp(product - log) * p.eps);\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    row_features_store(first + n, exp(product - log) * p.eps);\n    \
                    row_features_store(first + p.direction_count + n, exp(-product - log) * p.eps);\n}\n"
            }
            Randoms::Trigonometric | Randoms::Fourier => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    let turn = sine_cosine(product) * p.eps;\n    \
                    row_features_store(first + n, turn.x);\n    \
                    row_features_store(first + p.direction_count + n, turn.y);\n}\n"
            }
            Randoms::Relu => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    row_features_store(first + n, select(product, 0.0, product <= 0.0) + p.eps);\n}\n"
            }
        }
    }

    /// Returns the WGSL of the gradient of the n-th product.
    pub(super) fn gradient(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return row_features_at(feature + n) * d_features_at(gradient + n);\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return row_features_at(feature + n) * d_features_at(gradient + n)\n        \
                        - row_features_at(feature + p.direction_count + n) * d_features_at(gradient + p.direction_count + n);\n}\n"
            }
            Randoms::Trigonometric | Randoms::Fourier => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return row_features_at(feature + p.direction_count + n) * d_features_at(gradient + n)\n        \
                        - row_features_at(feature + n) * d_features_at(gradient + p.direction_count + n);\n}\n"
            }
            Randoms::Relu => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return select(0.0, d_features_at(gradient + n), row_features_at(feature + n) > p.eps);\n}\n"
            }
        }
    }
}
