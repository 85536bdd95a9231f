//! Several buffers of one type. The kernel chooses a buffer by its number.

use std::fmt::Write as _;

use super::{Binding, Width};
use crate::tensor::DType;

/// `count` buffers of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slots {
    pub count: usize,
    pub dtype: DType,
}

impl Slots {
    /// The binding of each buffer: `NAME0`, `NAME1`, ….
    pub fn bindings(self, name: &str, width: Width) -> impl Iterator<Item = Binding> {
        (0..self.count).map(move |slot| Binding::read(format!("{name}{slot}"), self.dtype, width))
    }

    /// `NAME_at(slot, o)` and `NAME_at4(slot, o, stride, n)`, which load from buffer `slot`.
    /// Without any buffer they return zeros. `four` is the type of the elements that `NAME_at4`
    /// loads.
    pub fn functions(self, name: &str, four: &str) -> String {
        let mut text = String::new();
        let functions = [
            (
                "at4",
                "o: u32, stride: u32, n: u32",
                "o, stride, n",
                format!("vec4<{four}>"),
                format!("vec4<{four}>()"),
            ),
            ("at", "o: u32", "o", "f32".to_string(), "0.0".to_string()),
        ];
        for (function, parameters, arguments, result, none) in functions {
            let _ = writeln!(text, "fn {name}_{function}(slot: u32, {parameters}) -> {result} {{");
            for slot in 1..self.count {
                let _ = writeln!(
                    text,
                    "    if slot == {slot}u {{ return {name}{slot}_{function}({arguments}); }} else {{"
                );
            }
            let close = "}".repeat(self.count.saturating_sub(1));
            let first = if self.count > 0 { format!("{name}0_{function}({arguments})") } else { none };
            let _ = writeln!(text, "    return {first}; {close}\n}}");
        }
        text
    }
}
