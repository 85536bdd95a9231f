//! The parts that the kernels share: parameters, and WGSL that reads and writes their arrays.

use std::borrow::Cow;

use crate::kernel::{Declared, Field, Kernel, Shared, Table, params, shader};
use crate::linear_attention::plan::LinearTiles;

params! {
    /// The numbers of all kernels, flat in the `Params` of each kernel. Arrays are given by their
    /// first element in the memory of a span.
    #[derive(Default)]
    pub(crate) struct RecurrentNumbers {
        value_heads: u32,
        /// Value heads of a key head.
        group: u32,
        head_dim: u32,
        value_dim: u32,
        /// Floats of a row of features and of a row of values.
        features: u32,
        values: u32,
        length: u32,
        chunk_len: u32,
        /// The first chunk of the span, its chunks, and the chunks of a batch entry.
        first_slot: u32,
        slots: u32,
        all_slots: u32,
        sequences: u32,
        /// States in the caller's memory: of the tensor that is written, and of the first states.
        all_states: u32,
        all_initial: u32,
        /// 1 if gradients are added to the contents of their tensors.
        accumulates: u32,
        scale: f32,
        /// The number added to the square of the length of a row.
        eps: f32,
        queries: u32,
        keys: u32,
        prefix_queries: u32,
        prefix_keys: u32,
        suffix_keys: u32,
        factors: u32,
        rates: u32,
        ends: u32,
        norms: u32,
        scores: u32,
        states: u32,
        d_out: u32,
        d_queries: u32,
        d_keys: u32,
        d_suffix_keys: u32,
        d_states: u32,
        d_ends: u32,
        /// The workgroups of one of several products of a dispatch.
        tiles: u32,
        /// The operands of a product. `depth` is the length of their rows.
        left: u32,
        right: u32,
        depth: u32,
        result: u32,
        /// The operand and the result of the second product of a dispatch. The second result is
        /// relative to the first one.
        second_left: u32,
        second_result: u32,
        second_sign: f32,
    }
}

impl Shared for RecurrentNumbers {
    const WGSL: &'static str = "RecurrentNumbers";
    const MEMBERS: &'static [Field] = Self::FIELDS;
}

/// The properties that most of the kernels have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RecurrentForm {
    /// True if an update is the difference from the value that the state gives for the key.
    pub delta: bool,
    /// True if each channel has its own decay.
    pub by_channel: bool,
    /// True if rows of queries and keys get the length 1.
    pub unit: bool,
}

impl RecurrentForm {
    pub fn all() -> [Self; 4] {
        [(true, false, true), (false, false, false), (true, true, false), (false, true, true)]
            .map(|(delta, by_channel, unit)| RecurrentForm { delta, by_channel, unit })
    }
}

/// The builder of a kernel: its declarations and its WGSL.
pub(super) struct Pieces {
    declared: Declared,
    workgroup: u32,
    memory: u32,
    texts: Vec<Cow<'static, str>>,
}

impl Pieces {
    pub fn new(declared: Declared, workgroup: u32) -> Self {
        let declared = declared.u32("WORKGROUP", workgroup);
        Pieces { declared, workgroup, memory: 0, texts: vec![shader!("tensor/view").into()] }
    }

    /// Begins a kernel whose invocations compute tiles.
    pub fn tiled(declared: Declared, tiles: LinearTiles) -> Self {
        let declared = declared.u32("COLUMN_LANES", tiles.lanes).u32("ROWS", tiles.rows);
        Self::new(declared, tiles.workgroup).text(shader!("linear_attention/tile"))
    }

    pub fn form(self, form: RecurrentForm) -> Self {
        self.bool("IS_DELTA", form.delta).bool("IS_BY_CHANNEL", form.by_channel).bool("IS_UNIT", form.unit)
    }

    pub fn bool(self, name: &'static str, value: bool) -> Self {
        Pieces { declared: self.declared.bool(name, value), ..self }
    }

    pub fn u32(self, name: &'static str, value: u32) -> Self {
        Pieces { declared: self.declared.u32(name, value), ..self }
    }

    pub fn text(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        self.texts.push(text.into());
        self
    }

    /// Declares the bytes of the kernel's workgroup memory.
    pub fn workgroup_memory(self, memory: usize) -> Self {
        Pieces { memory: memory as u32, ..self }
    }

    /// Adds the table of chunks, and the places of rows.
    pub fn chunks(self) -> Self {
        self.rows().text(shader!("recurrent/chunks"))
    }

    /// Adds the places of rows.
    pub fn rows(self) -> Self {
        self.text(shader!("recurrent/row_at"))
    }

    /// Adds the products of arrays.
    pub fn products(self) -> Self {
        self.text(shader!("recurrent/products"))
    }

    /// Adds the stores of a tile's sums.
    pub fn sums(self) -> Self {
        self.text(
            "fn store_sums(at: u32, stride: u32) {\n    \
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {\n        \
                    memory_store4(at + r * stride, sums[r]);\n    }\n}\n",
        )
    }

    /// Adds `function(b, h, i, c)`, which returns four elements of a tensor of the caller, zeros
    /// past the last.
    pub fn tensor(self, name: &str, function: &str, end: &str, in_fours: bool) -> Self {
        let load = if in_fours {
            format!("if c + 4u <= {end} {{ return {name}_at4(o, 1u, 4u); }} else {{ return vec4<f32>(); }}")
        } else {
            format!("return {name}_at4(o, p.{name}.strides.w, min(4u, max({end}, c) - c));")
        };
        self.text(format!(
            "fn {function}(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> {{\n    \
                let o = view_at(p.{name}, b, h, i, min(c, {end} - 1u));\n    {load}\n}}\n"
        ))
    }

    /// Adds `NAME_read(o, c)` or `NAME_write(o, c, x)` for four elements from column `c` on.
    /// Elements past the last value are zeros, or stay unchanged.
    pub fn state(self, name: &str, writes: bool, in_fours: bool) -> Self {
        let read = if in_fours {
            format!("return {name}_at4(o, 1u, 4u);")
        } else {
            format!("return {name}_at4(o, p.{name}.strides.w, min(4u, p.value_dim - c));")
        };
        let write = if in_fours {
            format!("{name}_store4(o, x);")
        } else {
            format!(
                "for (var n = 0u; n < min(4u, p.value_dim - c); n++) {{\n        \
                    {name}_store(o + n * p.{name}.strides.w, component(x, n));\n    }}"
            )
        };
        let text = format!("fn {name}_read(o: u32, c: u32) -> vec4<f32> {{ {read} }}\n");
        let stores = format!("fn {name}_write(o: u32, c: u32, x: vec4<f32>) {{\n    {write}\n}}\n");
        self.text(if writes { text + &stores } else { text })
    }

    /// Adds the stores to `written`.
    pub fn store(self, in_fours: bool) -> Self {
        self.bool("IN_FOURS", in_fours)
            .text(shader!("linear_attention/store"))
            .text("fn row_end() -> u32 { return p.value_dim; }\n")
    }

    pub fn kernel(self) -> Kernel {
        let texts: Vec<&str> = self.texts.iter().map(|text| text.as_ref()).collect();
        self.declared.kernel(&texts, self.workgroup, self.memory)
    }
}
