//! Masks as WGSL: the parts a call uses, composed into the functions of `shared/mask.wgsl`.

use std::fmt::Write as _;

use super::shader;
use crate::kernel::{Binding, View, Width, params, shared};
use crate::mask::DeviceMask;
use crate::problem::Shape;
use crate::tensor::{DType, DeviceFacts, TensorView, Window, broadcast};

/// Which parts a call's mask has. Parts that are absent leave no trace in the shader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Parts {
    pub left: bool,
    pub right: bool,
    pub exclude_self: bool,
    pub lengths: bool,
    pub keep: bool,
    pub keys: bool,
    pub bias: Option<DType>,
    pub softcap: bool,
    pub appended: bool,
}

impl Parts {
    pub fn of(mask: &DeviceMask, softcap: bool, appended: bool) -> Self {
        Parts {
            left: mask.band.left.is_some(),
            right: mask.band.right.is_some(),
            exclude_self: mask.band.exclude_self,
            lengths: mask.lengths.is_some(),
            keep: mask.keep.is_some(),
            keys: mask.keys.is_some(),
            bias: mask.bias.map(|b| b.dtype),
            softcap,
            appended,
        }
    }

    /// Only what bounds the range of keys: all that the tiled products look at.
    pub fn range_only(self) -> Self {
        Parts {
            left: self.left,
            right: self.right,
            lengths: self.lengths,
            appended: self.appended,
            ..Parts::default()
        }
    }

    /// Whether anything depends on single pairs: what only bounds the range of a query's keys does not.
    /// Appended keys lie outside of that range, so with them every pair is asked for.
    pub fn asks_pairs(&self) -> bool {
        self.appended || self.exclude_self || self.keep || self.keys || self.bias.is_some() || self.softcap
    }

    /// None, each alone, all together.
    pub fn all() -> Vec<Self> {
        let none = Parts::default();
        vec![
            none,
            Parts { left: true, ..none },
            Parts { right: true, ..none },
            Parts { exclude_self: true, ..none },
            Parts { lengths: true, ..none },
            Parts { keep: true, ..none },
            Parts { keys: true, ..none },
            Parts { bias: Some(DType::F32), ..none },
            Parts { bias: Some(DType::F16), ..none },
            Parts { softcap: true, ..none },
            Parts { appended: true, ..none },
            Parts {
                left: true,
                right: true,
                exclude_self: true,
                lengths: true,
                keep: true,
                keys: true,
                bias: Some(DType::F32),
                softcap: true,
                appended: true,
            },
        ]
    }

    /// The storage buffers of these parts, in binding order.
    pub fn bindings(&self) -> Vec<Binding> {
        let mut bindings = Vec::new();
        if self.lengths {
            bindings.push(Binding::read("lengths", DType::U32, Width::One));
        }
        if self.keep {
            bindings.push(Binding::read("keep", DType::Bool, Width::One));
        }
        if self.keys {
            bindings.push(Binding::read("keys", DType::Bool, Width::One));
        }
        if let Some(dtype) = self.bias {
            bindings.push(Binding::read("bias", dtype, Width::One));
        }
        bindings
    }

    /// The windows of `mask` that [`bindings`](Self::bindings) names, in the same order.
    pub fn windows<'a>(&self, mask: &DeviceMask<'a>, device: &DeviceFacts) -> Vec<Window<'a>> {
        let used = [
            (self.lengths, mask.lengths),
            (self.keep, mask.keep),
            (self.keys, mask.keys),
            (self.bias.is_some(), mask.bias),
        ];
        used.into_iter().filter(|(used, _)| *used).filter_map(|(_, t)| t).map(|t| t.window(device)).collect()
    }

    /// The WGSL of these parts and of the functions composed of them.
    pub fn wgsl(&self) -> String {
        let mut text = shader!("shared/mask").to_string();
        let rules = [
            (self.right, "mask_right", shader!("shared/mask_right"), true),
            (self.left, "mask_left", shader!("shared/mask_left"), true),
            (self.lengths, "mask_lengths", shader!("shared/mask_lengths"), true),
            (self.exclude_self, "mask_exclude_self", shader!("shared/mask_exclude_self"), false),
            (self.keep, "mask_keep", shader!("shared/mask_keep"), false),
            (self.keys, "mask_keys", shader!("shared/mask_keys"), false),
        ];
        let changes = [
            (self.softcap, "score_softcap", shader!("shared/score_softcap"), false),
            (self.bias.is_some(), "score_bias", shader!("shared/score_bias"), true),
        ];
        let mut permits = String::from("\nfn permits(s: Site) -> bool {\n");
        let mut range = String::from(
            "\nfn key_range(b: u32, h: u32, first: u32, last: u32) -> vec2<u32> {\n    \
             var r = vec2<i32>(0, i32(p.mask.masked_len));\n",
        );
        let mut changed = String::from("\nfn changed(score: f32, s: Site) -> f32 {\n    var x = score;\n");
        if self.appended {
            permits.push_str("    if s.j >= p.mask.masked_len {\n        return true;\n    }\n");
        }
        for (used, name, source, bounds) in rules {
            if used {
                let _ = write!(text, "\n{source}");
                let _ = writeln!(permits, "    if !{name}_permits(s) {{\n        return false;\n    }}");
                if bounds {
                    let _ = writeln!(range, "    r = {name}_range(r, b, h, first, last);");
                }
            }
        }
        for (used, name, source, masked_only) in changes {
            if used {
                let _ = write!(text, "\n{source}");
                let _ = if masked_only && self.appended {
                    writeln!(changed, "    if s.j < p.mask.masked_len {{\n        x = {name}(x, s);\n    }}")
                } else {
                    writeln!(changed, "    x = {name}(x, s);")
                };
            }
        }
        if self.appended {
            range.push_str("    r = vec2<i32>(min(r.x, i32(p.mask.masked_len)), i32(p.mask.kv_len));\n");
        }
        permits.push_str("    return true;\n}\n");
        range.push_str("    return clamped_range(r);\n}\n");
        changed.push_str("    return x;\n}\n");
        text + &permits + &changed + &range
    }
}

params! {
    /// The WGSL `MaskParams`.
    pub(crate) struct MaskParams {
        lengths: View,
        keep: View,
        keys: View,
        bias: View,
        diagonal: i32,
        left: i32,
        right: i32,
        masked_len: u32,
        q_len: u32,
        kv_len: u32,
        softcap: f32,
        none: f32,
    }
}
shared! { MaskParams = "MaskParams" }

impl MaskParams {
    /// `appended` of the `kv_len` keys stand outside of the mask.
    pub fn new(
        mask: &DeviceMask,
        shape: &Shape,
        appended: usize,
        softcap: Option<f32>,
        device: &DeviceFacts,
    ) -> Self {
        let view = |t: Option<TensorView>| {
            t.map_or(View::default(), |t| View::from(broadcast(t.window(device).layout)))
        };
        let masked_len = shape.kv_len - appended;
        // A bound beyond every key bounds nothing; the sum of two lengths fits where both tensors did.
        let reach = |bound: Option<usize>| bound.unwrap_or(usize::MAX).min(shape.q_len + masked_len) as i32;
        MaskParams {
            lengths: view(mask.lengths),
            keep: view(mask.keep),
            keys: view(mask.keys),
            bias: view(mask.bias),
            diagonal: mask.band.diagonal(shape.q_len, masked_len) as i32,
            left: reach(mask.band.left),
            right: reach(mask.band.right),
            masked_len: masked_len as u32,
            q_len: shape.q_len as u32,
            kv_len: shape.kv_len as u32,
            softcap: softcap.unwrap_or(0.0),
            none: f32::NEG_INFINITY,
        }
    }
}
