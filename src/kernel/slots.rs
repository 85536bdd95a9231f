//! Several buffers that a kernel picks from by number.

use std::fmt::Write as _;

use super::{Binding, Width};
use crate::tensor::DType;

/// So many buffers of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slots {
    pub count: usize,
    pub dtype: DType,
}

impl Slots {
    /// Their bindings, and `NAME_at(slot, o)`, `NAME_at4(slot, o, stride, n)` that pick one by number; `NAME_at4` gives f16 as it is if
    /// `native`, else f32.
    pub fn declare_as(
        self,
        name: &str,
        width: Width,
        native: bool,
        bindings: &mut Vec<Binding>,
        text: &mut String,
    ) {
        for slot in 0..self.count {
            let binding = Binding::read(format!("{name}{slot}"), self.dtype, width);
            bindings.push(Binding { native, ..binding });
        }
        let four = format!("vec4<{}>", if native { self.dtype.operand() } else { "f32" });
        let functions = [
            ("at4", "o: u32, stride: u32, n: u32", "o, stride, n", four.as_str()),
            ("at", "o: u32", "o", "f32"),
        ];
        for (function, parameters, arguments, result) in functions {
            let _ = writeln!(text, "fn {name}_{function}(slot: u32, {parameters}) -> {result} {{");
            for slot in 1..self.count {
                let _ = writeln!(
                    text,
                    "    if slot == {slot}u {{ return {name}{slot}_{function}({arguments}); }} else {{"
                );
            }
            let close = "}".repeat(self.count.saturating_sub(1));
            let _ = writeln!(text, "    return {name}0_{function}({arguments}); {close}\n}}");
        }
    }
}
