//! The custom functions in kernels: their texts, and a uniform of their captured values.

use std::fmt::Write as _;

use super::MaskVariant;
use super::compose::SlopeBy;
use crate::device::DeviceFacts;
use crate::kernel::View;
use crate::mask::mods::{Bound, Captured, Interned, ScoreMod};
use crate::mask::{DeviceMask, Id};
use crate::tensor::DType;

/// Returns the binding of a mod's n-th tensor.
pub(super) fn captured(interned: Interned, n: usize) -> String {
    format!("{}_tensor{n}", interned.prefix())
}

/// Strides, shape and offset of a captured tensor.
const CAPTURED: &str = "
struct Captured {
    strides: vec4<u32>,
    shape: vec4<u32>,
    offset: vec4<u32>,
}
";

/// Returns the derivative's text. `PREFIX_reading` returns the seed of a reading: 1 for the wanted
/// reading, whose element it records, and 0 for others. It has no branch. FXC rejects a barrier
/// after a loop with a branch that stores the element. The rejected loops have a length that
/// differs between pairs.
fn derivative(interned: Interned, by: SlopeBy) -> String {
    let n = match by {
        SlopeBy::Score => return interned.source().slope.clone().unwrap_or_default(),
        SlopeBy::Captured(n) => n,
    };
    let Some(slope) = interned.derivative_by_captured(n) else { return READING.to_string() };
    let prefix = interned.prefix();
    format!(
        "{READING}\
         var<private> {prefix}_wanted: u32;\n\
         var<private> {prefix}_readings: u32;\n\
         var<private> {prefix}_place: u32;\n\
         fn {prefix}_reading(a: u32, b: u32, c: u32, d: u32) -> f32 {{\n    \
             let shape = mods.{prefix}_view{n}.shape;\n    \
             let at = min(vec4<u32>(a, b, c, d), shape - 1u);\n    \
             let wanted = {prefix}_readings == {prefix}_wanted;\n    \
             {prefix}_readings += 1u;\n    \
             {prefix}_place = select({prefix}_place, ((at.x * shape.y + at.y) * shape.z + at.z) * shape.w + at.w, wanted);\n    \
             return select(0.0, 1.0, wanted);\n}}\n{slope}"
    )
}

const READING: &str = "
struct Reading {
    place: u32,
    slope: f32,
    readings: u32,
}
";

/// The text for a kernel without a mod.
const NO_READINGS: &str = "
fn captured_slope(score: f32, q: Query, j: u32, wanted: u32) -> Reading {
    return Reading(0u, 0.0, 0u);
}
";

/// A score function for the list of kernels. Its loop has a branch, and the query sets the number
/// of iterations. FXC rejects some kernels with a barrier after such a loop.
const LISTED: &str = "
fn entry(at: At, n: u32) -> f32 { return table_at(at.head, 0u, n % 7u, 0u); }
fn score_mod(score: f32, at: At) -> f32 {
    var sum = tanh(score * entry(at, at.key));
    for (var n = 0u; n < at.query % 4u; n++) {
        if at.key > n { sum += 0.5 * entry(at, at.key + n) * entry(at, n); }
    }
    if at.key % 3u == 0u { sum *= table_at(0u, 0u, 6u, 0u); }
    return sum;
}";

/// The alignment of a mod's words, in bytes.
const VECTOR: usize = 16;

impl MaskVariant {
    /// Returns a score function that captures a tensor of floats, for the list of kernels.
    pub fn listed_score_mod() -> Option<Self> {
        let listed = ScoreMod::capturing(LISTED, &[Captured::float("table")]).ok()?;
        let dtypes = std::array::from_fn(|n| (n == 0).then_some(DType::F32));
        Some(MaskVariant { score: Some((listed.0, dtypes)), ..Self::default() })
    }

    /// True if mods have captured values, which are in a uniform.
    pub(super) fn has_mods_block(&self) -> bool {
        self.mods().any(|(interned, dtypes)| interned.uniform_words() > 0 || dtypes[0].is_some())
    }

    /// Returns the mods of `mask` that these kernels have.
    pub(super) fn bound<'a>(&self, mask: &DeviceMask<'a>) -> impl Iterator<Item = Bound<'a>> + use<'a> {
        let mods = mask.mods();
        let [score, pairs] =
            [mods.score.filter(|_| self.score.is_some()), mods.pairs.filter(|_| self.pairs.is_some())];
        [score, pairs].into_iter().flatten()
    }

    /// Returns the bytes of the mods' captured values.
    pub(super) fn mods_bytes(&self, mask: &DeviceMask, device: &DeviceFacts) -> Vec<u8> {
        let mut bytes = Vec::new();
        for bound in self.bound(mask) {
            bytes.extend(bytemuck::cast_slice::<u32, u8>(bound.words()));
            bytes.resize(bytes.len().next_multiple_of(VECTOR), 0);
            for (_, tensor) in bound.tensors() {
                let layout = tensor.window(device).layout;
                let View { strides, offset, .. } = View::from(layout);
                let block = [strides, layout.shape.map(|n| n as u32), [offset, 0, 0, 0]];
                bytes.extend(bytemuck::bytes_of(&block));
            }
        }
        bytes
    }

    /// Returns the mods' texts, `at_of` for each, and the accessors of captured tensors.
    pub(super) fn mods_wgsl(&self, slope: Option<SlopeBy>) -> String {
        let mut text = String::new();
        if self.mods().any(|(_, dtypes)| dtypes[0].is_some()) {
            text.push_str(CAPTURED);
        }
        if self.score.is_none() && matches!(slope, Some(SlopeBy::Captured(_))) {
            text.push_str(READING);
        }
        let mut members = String::new();
        for (interned, dtypes) in self.mods() {
            let prefix = interned.prefix();
            let words = interned.uniform_words();
            if words > 0 {
                let _ = writeln!(members, "    {prefix}_words: array<vec4<u32>, {}>,", words.div_ceil(4));
            }
            for (n, dtype) in dtypes.into_iter().flatten().enumerate() {
                let _ = writeln!(members, "    {prefix}_view{n}: Captured,");
                let ty = match dtype {
                    d if d.is_float() => "f32",
                    DType::Bool => "bool",
                    _ => "u32",
                };
                let tensor = captured(interned, n);
                // An index past the end reads the last element of its axis. On an axis of 1 every
                // index reads the one element.
                let _ = writeln!(
                    text,
                    "fn {prefix}_captured{n}(a: u32, b: u32, c: u32, d: u32) -> {ty} {{\n    \
                         let at = min(vec4<u32>(a, b, c, d), mods.{prefix}_view{n}.shape - 1u) * mods.{prefix}_view{n}.strides;\n    \
                         return {tensor}_at(at.x + at.y + at.z + at.w + mods.{prefix}_view{n}.offset.x);\n}}"
                );
            }
            text.push_str(&self.at_of(interned));
            text.push_str(&interned.source().value);
            if let Some(slope) = slope.filter(|_| self.score.is_some_and(|(score, _)| score == interned)) {
                text.push_str(&derivative(interned, slope));
            }
        }
        if self.has_mods_block() {
            let _ = write!(text, "struct Mods {{\n{members}}}\n");
        }
        text
    }

    /// Returns the text of `captured_slope`. The function returns the derivative by a reading of
    /// the n-th tensor, the element read, and the number of readings.
    pub(super) fn captured_slope(&self, n: usize) -> String {
        let Some((interned, _)) = self.score.filter(|(score, _)| score.derivative_by_captured(n).is_some())
        else {
            return NO_READINGS.to_string();
        };
        let prefix = interned.prefix();
        format!(
            "\nfn captured_slope(score: f32, q: Query, j: u32, wanted: u32) -> Reading {{\n    \
                 {prefix}_wanted = wanted;\n    \
                 {prefix}_readings = 0u;\n    \
                 let slope = {prefix}_slope(score, {prefix}_at(q, j));\n    \
                 return Reading({prefix}_place, slope, {prefix}_readings);\n}}\n"
        )
    }

    /// Returns the argument of a mod: the members of `At` that its text uses.
    fn at_of(&self, interned: Interned) -> String {
        let prefix = interned.prefix();
        let (mut members, mut values) = (String::new(), Vec::new());
        for (name, ty, value) in interned.members() {
            let _ = writeln!(members, "    {name}: {ty},");
            values.push(match value {
                "p.mask.masked_len" if self.cached => "cached_len(q.b)",
                "QUERY_DOCUMENT" if self.has(Id::Documents) => "q.document",
                "KEY_DOCUMENT" if self.has(Id::Documents) => {
                    "key_documents_at(view_at(p.mask.key_documents, q.b, q.h, 0u, j))"
                }
                "QUERY_DOCUMENT" | "KEY_DOCUMENT" => "0u",
                other => other,
            });
        }
        let values = values.join(", ");
        format!(
            "fn {prefix}_neg_inf() -> f32 {{\n    return p.mask.neg_inf;\n}}\n\
             struct {prefix}_At {{\n{members}}}\n\
             fn {prefix}_at(q: Query, j: u32) -> {prefix}_At {{\n    return {prefix}_At({values});\n}}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::kernel::texts::TEXTS;
    use crate::mask::RULES;

    /// Kernels must not declare the name of a builtin or of a mod. The text of a mod in a kernel
    /// calls builtins by name.
    #[test]
    fn kernels_declare_no_builtin() {
        let builtins = "abs min max clamp saturate cos cosh sin sinh tan tanh acos asin atan atan2 asinh acosh atanh radians degrees \
            ceil floor round fract trunc ldexp exp exp2 log log2 pow dot cross distance length normalize faceForward reflect refract \
            sign fma mix step smoothstep sqrt inverseSqrt quantizeToF16 select all any bitcast vec2 vec3 vec4 array f32 i32 u32 bool \
            countTrailingZeros countLeadingZeros countOneBits reverseBits extractBits insertBits firstTrailingBit firstLeadingBit \
            pack4x8snorm pack4x8unorm pack2x16snorm pack2x16unorm pack2x16float pack4xI8 pack4xU8 pack4xI8Clamp pack4xU8Clamp \
            unpack4x8snorm unpack4x8unorm unpack2x16snorm unpack2x16unorm unpack2x16float unpack4xI8 unpack4xU8 dot4I8Packed dot4U8Packed";
        let names = |line: &'static str| {
            let declared = ["fn ", "const ", "alias ", "struct ", "var<private> ", "var<workgroup> "];
            let rest = declared.into_iter().find_map(|word| line.strip_prefix(word));
            rest.and_then(|rest| rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next())
        };
        let rules = RULES.iter().map(|rule| rule.wgsl);
        for text in TEXTS.iter().copied().chain(rules) {
            for name in text.lines().filter_map(names) {
                assert!(!builtins.split_whitespace().any(|builtin| builtin == name), "{name}");
                assert!(!["sm_", "mm_"].iter().any(|prefix| name.starts_with(prefix)), "{name}");
            }
        }
    }
}
