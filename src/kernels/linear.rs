//! What the kernels of linear attention share: parameters, and the pieces that read and write their tensors.

use std::borrow::Cow;

use super::shader;
use crate::feature_map::RandomFeatures;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::mods::{FeatureMod, Interned};
use crate::plan::LinearTiles;
use crate::tensor::DType;

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        d_out: View,
        x: View,
        heads: u32,
        kv_heads: u32,
        group: u32,
        features: u32,
        q_len: u32,
        kv_len: u32,
        value_dim: u32,
        chunk_len: u32,
        first_slot: u32,
        slots: u32,
        all_slots: u32,
        sequences: u32,
        state_stride: u32,
        accumulates: u32,
        has_state: u32,
        eps: f32,
        scale: f32,
        neg_inf: f32,
        head_dim: u32,
        directions: u32,
        value_unit: f32,
        value_scale: f32,
        pad0: u32,
        pad1: u32,
    }
}

/// What makes a feature of an element as it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phi {
    Identity,
    Elu,
    Relu,
    /// The caller's own.
    Custom(Interned),
}

/// As `FeatureMod` has them, for the list of kernels.
const LISTED: &str = "fn feature_map(x: f32) -> f32 { return log(1.0 + exp(x)); }";

impl Phi {
    /// One of each kind.
    pub fn all() -> Vec<Self> {
        let own = FeatureMod::new(LISTED).ok().map(|own| Phi::Custom(own.0));
        [Some(Phi::Identity), Some(Phi::Elu), Some(Phi::Relu), own].into_iter().flatten().collect()
    }

    /// The feature and its slope, of four elements. NaN stays.
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

/// The text of a feature map of the caller's own, and its slope if it has one. It is written as a score function, which is asked for a pair.
fn custom(own: Interned) -> String {
    // Bits of a variable: WGSL refuses a constant that is infinite.
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

/// What most of the kernels have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearForm {
    pub tiles: LinearTiles,
    pub causal: bool,
    /// Whether keys have logarithmic weights.
    pub scaled: bool,
    /// Whether several sequences are packed.
    pub packed: bool,
    /// Whether all tensors load in fours along their channels.
    pub fours: bool,
}

impl LinearForm {
    /// Whether chunks are in a table.
    pub fn has_table(&self) -> bool {
        self.scaled || self.packed
    }

    /// Each value of each axis.
    pub fn all() -> impl Iterator<Item = Self> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            [false, true].into_iter().flat_map(move |causal| {
                [(false, false), (true, false), (false, true), (true, true)].into_iter().map(
                    move |(scaled, packed)| LinearForm {
                        tiles,
                        causal,
                        scaled,
                        packed,
                        fours: scaled == packed,
                    },
                )
            })
        })
    }

    /// One of them, in fours or not.
    pub fn plain(fours: bool) -> Self {
        LinearForm { tiles: LinearTiles::ALL[0], causal: true, scaled: false, packed: false, fours }
    }
}

const STATE_BEFORE: &str = "fn state_at(b: u32, kv: u32, slot: u32, chunk: Chunk) -> u32 {\n    \
        return ((b * p.kv_heads + kv) * p.slots + slot) * p.features * p.state_stride;\n}\n";
const STATE_TOTAL: &str = "fn state_at(b: u32, kv: u32, slot: u32, chunk: Chunk) -> u32 {\n    \
        return (chunk.sequence * p.kv_heads + kv) * p.features * p.state_stride;\n}\n";
const LOG_AT: &str =
    "fn log_at(b: u32, kv: u32, j: u32) -> f32 { return logs_at((b * p.kv_heads + kv) * p.kv_len + j); }\n";
const NO_LOG_AT: &str = "fn log_at(b: u32, kv: u32, j: u32) -> f32 { return 0.0; }\n";

/// A kernel that is being put together.
pub(super) struct Pieces {
    form: LinearForm,
    constants: Vec<Constant>,
    bindings: Vec<Binding>,
    texts: Vec<String>,
}

impl Pieces {
    pub fn new(form: LinearForm) -> Self {
        let LinearTiles { workgroup, lanes, rows } = form.tiles;
        let constants = vec![
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("COLUMN_LANES", lanes),
            Constant::U32("ROWS", rows),
            Constant::Bool("IS_CAUSAL", form.causal),
            Constant::Bool("IS_SCALED", form.scaled),
            Constant::Bool("IN_FOURS", form.fours),
        ];
        let texts = [
            shader!("tensor/view"),
            shader!("linear/params"),
            shader!("linear/chunks"),
            shader!("linear/hidden"),
        ];
        Pieces { form, constants, bindings: Vec::new(), texts: texts.map(String::from).into() }
    }

    pub fn constant(mut self, constant: Constant) -> Self {
        self.constants.push(constant);
        self
    }

    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.texts.push(text.into());
        self
    }

    pub fn bind(mut self, binding: Binding) -> Self {
        self.bindings.push(binding);
        self
    }

    pub fn bind_if(self, holds: bool, binding: impl FnOnce(Self) -> Self) -> Self {
        if holds { binding(self) } else { self }
    }

    fn width(&self) -> Width {
        Width::of(self.form.fours)
    }

    /// A tensor of the caller's, and `function(b, h, i, c)`, which gives four of its channels, zeros past the last.
    pub fn tensor(
        self,
        name: &'static str,
        view: &'static str,
        dtype: DType,
        function: &str,
        end: &str,
        wraps: [&str; 2],
    ) -> Self {
        let [open, close] = wraps;
        let width = self.width();
        let text = format!(
            "fn {function}(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> {{\n    \
                let o = view_at(p.{view}, b, h, i, c);\n    \
                if IN_FOURS {{\n        return {open}{name}_at4(o, 1u, 4u){close};\n    }} else {{\n        \
                let n = {end} - c;\n        \
                return select(vec4<f32>(), {open}{name}_at4(o, p.{view}.strides.w, n){close}, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(n));\n    }}\n}}\n"
        );
        self.bind(Binding::read(name, dtype, width)).text(text)
    }

    pub fn phi(self, phi: Phi) -> Self {
        self.text(phi.text())
    }

    pub fn queries(self, dtype: DType) -> Self {
        self.tensor("q", "q", dtype, "query_feature4", "p.features", ["phi4(", ")"])
    }

    pub fn keys(self, dtype: DType) -> Self {
        self.tensor("k", "k", dtype, "key_feature4", "p.features", ["phi4(", ")"])
    }

    pub fn values(self, dtype: DType) -> Self {
        self.tensor("v", "v", dtype, "value4", "p.value_dim", ["", ""])
    }

    pub fn d_out(self, dtype: DType) -> Self {
        self.tensor("d_out", "d_out", dtype, "d_out4", "p.value_dim", ["", ""])
    }

    /// The slope of φ at an element of `q` or `k`.
    pub fn slope(self, of: &'static str, dtype: DType, phi: Phi) -> Self {
        if phi == Phi::Identity {
            return self
                .text("fn slope4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return vec4<f32>(1.0); }\n");
        }
        self.tensor(of, of, dtype, "slope4", "p.features", ["phi_slope4(", ")"])
    }

    /// States to read: those before chunks or those of sequences.
    pub fn states(self) -> Self {
        let at = if self.form.causal { STATE_BEFORE } else { STATE_TOTAL };
        self.bind(Binding::read("states", DType::F32, Width::Four))
            .text(at)
            .text("fn state4(o: u32) -> vec4<f32> { return states_at4(o, 1u, 4u); }\n")
    }

    pub fn scores(self) -> Self {
        self.bind(Binding::read("scores", DType::F32, Width::Four))
    }

    pub fn stats(self) -> Self {
        self.bind(Binding::read("stats", DType::F32, Width::Four)).text(
            "fn stats_of(b: u32, h: u32, i: u32) -> vec4<f32> {\n    \
             return stats_at4(((b * p.heads + h) * p.q_len + i) * 4u, 1u, 4u);\n}\n",
        )
    }

    /// The chunks, and the logarithmic weights of keys if there are any and the kernel reads them, whose rows are counted by
    /// `rows_len` where there is no table.
    pub fn chunks(self, with_logs: bool, rows_len: &str) -> Self {
        let form = self.form;
        if !form.has_table() {
            return self
                .text(shader!("linear/no_table"))
                .text(format!("fn rows_len() -> u32 {{ return {rows_len}; }}\n"));
        }
        let logs = form.scaled && with_logs;
        let pieces = self.bind_if(logs, |p| p.bind(Binding::read("logs", DType::F32, Width::One)));
        pieces
            .text(if logs { LOG_AT } else { NO_LOG_AT })
            .bind(Binding::read("chunks", DType::U32, Width::One))
            .text(shader!("linear/table"))
    }

    /// Products: the tile of an invocation.
    pub fn product(self) -> Self {
        self.text(shader!("linear/tile"))
    }

    /// The logarithms of a tile's rows.
    pub fn row_logs(self) -> Self {
        self.text(shader!("linear/row_logs"))
    }

    /// What is written, by rows of so many columns.
    pub fn store(self, dtype: DType, columns: &str) -> Self {
        let width = self.width();
        self.bind(Binding::write("written", dtype, width))
            .text(shader!("linear/store"))
            .text(format!("fn row_end() -> u32 {{ return {columns}; }}\n"))
    }

    pub fn kernel(self) -> Kernel {
        let texts: Vec<&str> = self.texts.iter().map(String::as_str).collect();
        Kernel::new::<Params>(&self.constants, self.bindings, &texts, self.form.tiles.workgroup)
    }
}

/// A variant for each form, then for each type and φ of one.
pub(super) fn listed<T>(of: impl Fn(LinearForm, DType, Phi) -> T) -> Vec<T> {
    let forms = LinearForm::all().map(|form| of(form, DType::F32, Phi::Elu));
    let typed = super::FLOATS
        .into_iter()
        .flat_map(|dtype| [false, true].map(|fours| (LinearForm::plain(fours), dtype, Phi::Elu)));
    let mapped = Phi::all().into_iter().map(|phi| (LinearForm::plain(true), DType::F32, phi));
    let more: Vec<_> = typed.chain(mapped).map(|(form, dtype, phi)| of(form, dtype, phi)).collect();
    forms.chain(more).collect()
}

/// The form of products of rows with random directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowsForm {
    pub tiles: LinearTiles,
    pub fours: bool,
}

impl RowsForm {
    /// Each value of each axis, with the type of rows.
    pub fn all() -> impl Iterator<Item = (Self, DType)> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            super::FLOATS
                .into_iter()
                .flat_map(move |dtype| [false, true].map(|fours| (RowsForm { tiles, fours }, dtype)))
        })
    }
}

/// Rows of a head that a dispatch counts in x, before it counts in y.
pub(crate) const ROWS_EACH: usize = 1024;

impl Pieces {
    pub fn of_rows(form: RowsForm) -> Self {
        let RowsForm { tiles, fours } = form;
        Pieces::new(LinearForm { tiles, causal: false, scaled: false, packed: false, fours })
    }
}

/// Kinds of random features, as far as kernels differ.
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

    /// By what the square of a row's length is multiplied in the logarithm of its features.
    pub(super) fn half_square(self) -> &'static str {
        match self {
            Randoms::Positive | Randoms::Hyperbolic => "-0.5",
            Randoms::Trigonometric => "0.5",
            _ => "0.0",
        }
    }

    /// The largest logarithm of a row's features.
    pub(super) fn largest(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn largest_log(first: u32, factor: f32) -> f32 {\n    \
                    var largest = p.neg_inf;\n    \
                    for (var n = 0u; n < p.directions; n++) { largest = max(largest, features_at(first + n) * factor); }\n    \
                    return largest;\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn largest_log(first: u32, factor: f32) -> f32 {\n    \
                    var largest = 0.0;\n    \
                    for (var n = 0u; n < p.directions; n++) { largest = max(largest, abs(features_at(first + n) * factor)); }\n    \
                    return largest;\n}\n"
            }
            _ => "fn largest_log(first: u32, factor: f32) -> f32 { return 0.0; }\n",
        }
    }

    /// Features of the n-th product, in its place; `p.eps` is what their sum is divided by, or what is added to each.
    pub(super) fn features(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    features_store(first + n, exp(product - log) * p.eps);\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    features_store(first + n, exp(product - log) * p.eps);\n    \
                    features_store(first + p.directions + n, exp(-product - log) * p.eps);\n}\n"
            }
            Randoms::Trigonometric | Randoms::Fourier => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    let turn = sine_cosine(product) * p.eps;\n    \
                    features_store(first + n, turn.x);\n    \
                    features_store(first + p.directions + n, turn.y);\n}\n"
            }
            Randoms::Relu => {
                "fn make_features(first: u32, n: u32, product: f32, log: f32) {\n    \
                    features_store(first + n, select(product, 0.0, product <= 0.0) + p.eps);\n}\n"
            }
        }
    }

    /// The gradient of the n-th product.
    pub(super) fn gradient(self) -> &'static str {
        match self {
            Randoms::Positive => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return features_at(feature + n) * d_features_at(gradient + n);\n}\n"
            }
            Randoms::Hyperbolic => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return features_at(feature + n) * d_features_at(gradient + n)\n        \
                        - features_at(feature + p.directions + n) * d_features_at(gradient + p.directions + n);\n}\n"
            }
            Randoms::Trigonometric | Randoms::Fourier => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return features_at(feature + p.directions + n) * d_features_at(gradient + n)\n        \
                        - features_at(feature + n) * d_features_at(gradient + p.directions + n);\n}\n"
            }
            Randoms::Relu => {
                "fn product_gradient(feature: u32, gradient: u32, n: u32) -> f32 {\n    \
                    return select(0.0, d_features_at(gradient + n), features_at(feature + n) > p.eps);\n}\n"
            }
        }
    }
}
