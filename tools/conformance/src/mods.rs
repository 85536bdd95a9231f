//! The named mask and score functions of FlashAttention's newest tests.

use wgpu_attention::mask::{BoundScoreMod, Captured, DeviceMask, MaskMod, ScoreMod};

use crate::outcome::Failed;
use crate::tables::Tables;

/// Adds a mask function. Some are rules of `Mask`.
pub fn masked<'a>(mask: DeviceMask<'a>, name: &str, tables: &'a Tables) -> Result<DeviceMask<'a>, Failed> {
    let body = match name {
        "causal" => return Ok(mask.and_causal()),
        "sliding_window" => return Ok(mask.and_causal().window(128, 0)),
        // `mask` has the documents.
        "document" => return Ok(mask),
        "ima" => {
            let text = "fn mask_mod(at: At) -> bool { return at.key >= thresholds_at(0u, 0u, 0u, at.key); }";
            let captured = MaskMod::capturing(text, &[Captured::number("thresholds")])?;
            return Ok(mask.mask_mod(captured.with(&views(&["thresholds"], tables)?)));
        }
        "block_causal" => "i32(at.key) <= at.position",
        "block_diagonal" => "at.query / 128u == at.key / 128u",
        "mini_causal" => "at.query % 128u >= at.key % 128u",
        "prefix_lm" => "(at.query < 512u && at.key < 512u) || at.query >= at.key",
        "dilated_sliding_window" => {
            "at.query >= at.key && at.query - at.key < 256u && (at.query - at.key) % 2u == 0u"
        }
        other => return Err(Failed(format!("the mask {other} is not known"))),
    };
    Ok(mask.mask_mod(MaskMod::new(&format!("fn mask_mod(at: At) -> bool {{ return {body}; }}"))?))
}

/// Returns a score function, with the tensors that it captures.
pub fn score<'a>(name: &str, tables: &'a Tables) -> Result<BoundScoreMod<'a>, Failed> {
    let distance = "f32(abs(i32(at.query) - i32(at.key)))";
    let hidden = |seen: &str, score: &str| format!("select(neg_inf(), {score}, {seen})");
    let (key, query) = ("key_bias_at(0u, 0u, 0u, at.key)", "query_bias_at(0u, 0u, at.query, 0u)");
    let near = "at.query >= at.key && at.query - at.key <= 512u";
    let (body, captured): (String, &[&str]) = match name {
        "identity" => ("score".into(), &[]),
        "causal" => (hidden("at.query >= at.key", "score"), &[]),
        "rel_bias" => (format!("score + {distance}"), &[]),
        "rel_bias_x2" => (format!("score + 2.0 * {distance}"), &[]),
        "rel_bias_clamped" => (format!("score + min({distance}, 64.0)"), &[]),
        "times_two" => ("score * 2.0".into(), &[]),
        "alibi" => (format!("score - exp2(-f32(at.head + 1u)) * {distance}"), &[]),
        "sliding_window" => (hidden(&format!("{distance} <= 256.0"), "score"), &[]),
        "block_diagonal" => (hidden("at.query / 64u == at.key / 64u", "score"), &[]),
        "squared" => ("score * score".into(), &[]),
        "softcap" => ("20.0 * tanh(score / 20.0)".into(), &[]),
        "batch_bias" => ("score + batch_bias_at(at.batch, 0u, 0u, 0u)".into(), &["batch_bias"]),
        "dual_buffer" => (
            "score + head_bias_at(0u, at.head, 0u, 0u) + position_bias_at(0u, 0u, at.query, 0u)".into(),
            &["head_bias", "position_bias"],
        ),
        "scaled_squared" => ("score * score * key_scale_at(0u, 0u, 0u, at.key)".into(), &["key_scale"]),
        "complex_arithmetic" => (
            format!("score + 0.001 * {distance} + {query} * (0.001 * f32((at.batch + 1u) * (at.head + 1u)))"),
            &["query_bias"],
        ),
        "conditional_mask" => (hidden(near, &format!("score + {key}")), &["key_bias"]),
        "multi_buffer" => (
            format!(
                "score * head_scale_at(0u, at.head, 0u, 0u) + batch_bias_at(at.batch, 0u, 0u, 0u) + {query} + {key}"
            ),
            &["head_scale", "batch_bias", "query_bias", "key_bias"],
        ),
        "xor_pattern" => {
            (format!("score + 0.001 * f32((at.query ^ at.key) & 0xffu) + 0.1 * {key}"), &["key_bias"])
        }
        "global_kv_bias" => (format!("score + {key}"), &["key_bias"]),
        "global_q_bias" => (format!("score + {query}"), &["query_bias"]),
        "global_q_and_kv_bias" => (format!("score + {query} + {key}"), &["query_bias", "key_bias"]),
        "global_rel_plus_kv_bias" => (
            format!(
                "score + 0.1 * f32(abs(i32(query_index_at(0u, 0u, at.query, 0u)) - i32(at.key - at.sequence_start))) + {key}"
            ),
            &["key_bias", "query_index"],
        ),
        other => return Err(Failed(format!("the score function {other} is not known"))),
    };
    let text = format!("fn score_mod(score: f32, at: At) -> f32 {{ return {body}; }}");
    let kind = |name: &&str| match *name {
        "query_index" => Captured::number(*name),
        _ => Captured::float(*name),
    };
    let kinds: Vec<_> = captured.iter().map(kind).collect();
    Ok(ScoreMod::capturing(&text, &kinds)?.with(&views(captured, tables)?))
}

fn views<'a>(names: &[&str], tables: &'a Tables) -> Result<Vec<wgpu_attention::TensorView<'a>>, Failed> {
    let view = |name: &&str| tables.view(name).ok_or_else(|| Failed(format!("no input {name}")));
    names.iter().map(view).collect()
}
