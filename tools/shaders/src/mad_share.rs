//! How much of a kernel's inner loops multiplies and adds, by the drivers' text of what the GPU runs.

use crate::gpus::Driver;

/// A basic block is an inner loop if it has so many multiply-adds, or matrix instructions.
const MULTIPLY_ADDS: u64 = 32;
const MATRIX: u64 = 8;

#[derive(Default)]
struct Block {
    multiply_adds: u64,
    matrix: u64,
    all: u64,
}

/// What a line of the text is.
#[derive(Debug, PartialEq)]
enum Line {
    /// Begins a basic block.
    Label,
    Instructions {
        multiply_adds: u64,
        matrix: u64,
        all: u64,
        /// A branch, after which another block begins.
        ends: bool,
    },
    Other,
}

/// Multiply-adds, or matrix instructions, of a hundred instructions of the basic blocks that have many; none: there is no
/// such block.
pub fn of(driver: Driver, text: &str) -> Option<f64> {
    let parse = match driver {
        Driver::Nvk => nak,
        Driver::Radv => aco,
        Driver::Turnip => ir3,
        Driver::Honeykrisp => return None,
    };
    let mut blocks = vec![Block::default()];
    for line in text.lines() {
        match parse(line) {
            Line::Label => blocks.push(Block::default()),
            Line::Instructions { multiply_adds, matrix, all, ends } => {
                if let Some(block) = blocks.last_mut() {
                    block.multiply_adds += multiply_adds;
                    block.matrix += matrix;
                    block.all += all;
                }
                if ends {
                    blocks.push(Block::default());
                }
            }
            Line::Other => {}
        }
    }
    let loops = blocks.iter().filter(|b| b.multiply_adds >= MULTIPLY_ADDS || b.matrix >= MATRIX);
    let (these, all) =
        loops.fold((0, 0), |(these, all), b| (these + b.multiply_adds + b.matrix, all + b.all));
    (all > 0).then(|| 100.0 * these as f64 / all as f64)
}

/// `      r38      = ffma.ftz r94 r99 r38     // delay=1`, in `block… {`.
fn nak(line: &str) -> Line {
    if line.starts_with("block") {
        return Line::Label;
    }
    let Some((line, _)) = line.split_once("// delay") else { return Line::Other };
    let made = line.split_once(" = ").map_or(line, |(_, made)| made);
    let name = made.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
    let is = ["ffma", "hfma2"].iter().any(|start| name.starts_with(start));
    let matrix = name.starts_with("hmma").into();
    Line::Instructions { multiply_adds: is.into(), matrix, all: 1, ends: false }
}

/// `v_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5   ; c8…`, after `BB12:`, indented. Dual instructions are two.
fn aco(line: &str) -> Line {
    if line.starts_with("BB") {
        return Line::Label;
    }
    let name = |part: &str| part.split_whitespace().next().unwrap_or_default().to_owned();
    if !line.starts_with(char::is_whitespace) || !name(line).contains('_') {
        return Line::Other;
    }
    let starts = ["v_fma", "v_pk_fma", "v_dual_fma", "v_mac_f", "v_mad_f", "v_mad_mix"];
    let is = |part: &&str| starts.iter().any(|start| name(part).starts_with(start));
    Line::Instructions {
        multiply_adds: line.split(" :: ").filter(is).count() as u64,
        matrix: name(line).starts_with("v_wmma").into(),
        all: line.split(" :: ").count() as u64,
        ends: ["s_cbranch", "s_branch"].iter().any(|start| name(line).starts_with(start)),
    }
}

/// `(ss)(rpt1)mad.f32 r1.x, …`, after `l12:`: done once more, for the next registers. `(nop3)`: three that do nothing.
fn ir3(line: &str) -> Line {
    let mut rest = line.trim();
    if rest.starts_with('l') && rest.ends_with(':') {
        return Line::Label;
    }
    let (mut times, mut nothing) = (1, 0);
    while let Some((flag, after)) = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        let count = |name| flag.strip_prefix(name).and_then(|n: &str| n.parse::<u64>().ok()).unwrap_or(0);
        times += count("rpt");
        nothing += count("nop");
        rest = after;
    }
    let name = rest.split_whitespace().next().unwrap_or_default();
    // The lines before and after it are comments and sentences.
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        return Line::Other;
    }
    let is = name.starts_with("mad.f");
    let ends = ["br", "bany", "ball", "jump"].iter().any(|start| name.starts_with(start));
    Line::Instructions { multiply_adds: if is { times } else { 0 }, matrix: 0, all: times + nothing, ends }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(multiply_adds: u64, all: u64, ends: bool) -> Line {
        Line::Instructions { multiply_adds, matrix: 0, all, ends }
    }

    #[test]
    fn lines_of_nvk() {
        assert_eq!(nak("block.u 249 L460 [248] -> {"), Line::Label);
        assert_eq!(nak("} -> [249, 251]"), Line::Other);
        let ffma = "      r38      = ffma.ftz r94 r99 r38                           // delay=1";
        assert_eq!(nak(ffma), line(1, 1, false));
        let hmma = "      r8..12    = hmma.m16n8k16.f32 r0..4 r4..6 r8..12   // delay=1 rd:1 wr:2";
        let matrix = Line::Instructions { multiply_adds: 0, matrix: 1, all: 1, ends: false };
        assert_eq!(nak(hmma), matrix);
        assert_eq!(nak("                 bra !up0 L463             // delay=1"), line(0, 1, false));
    }

    #[test]
    fn lines_of_radv() {
        assert_eq!(aco("BB104:"), Line::Label);
        assert_eq!(aco("\tv_fmac_f32_e32 v56, v10, v82         ; 5670a50a"), line(1, 1, false));
        let dual = "\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6   ; c8000000";
        assert_eq!(aco(dual), line(2, 2, false));
        assert_eq!(aco("\tv_dual_mul_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5   ; c8"), line(0, 2, false));
        assert_eq!(aco("\ts_cbranch_scc0 BB105                 ; bfa10024"), line(0, 1, true));
        assert_eq!(aco("\tds_load_b64 v[80:81], v14 offset:5952"), line(0, 1, false));
    }

    #[test]
    fn lines_of_turnip() {
        assert_eq!(ir3("l845:"), Line::Label);
        assert_eq!(ir3("(ss)(rpt1)mad.f32 r11.w, r5.x, (r)r0.z, (r)(last)r11.w"), line(2, 2, false));
        assert_eq!(ir3("(nop3) mad.f32 r14.x, r4.z, r0.w, r14.x"), line(1, 4, false));
        assert_eq!(ir3("(rpt5)nop"), line(0, 6, false));
        assert_eq!(ir3("brao !p0.y, !p0.z, #l762"), line(0, 1, true));
        assert_eq!(ir3("; num_ubos:           0"), Line::Other);
    }

    #[test]
    fn only_blocks_with_many_count() {
        let few = "\tv_fma_f32 v0, v1, v2, v3\n".repeat(31);
        assert_eq!(of(Driver::Radv, &format!("BB0:\n{few}BB1:\n{few}")), None);
        let many = format!("{few}\tv_fma_f32 v0, v1, v2, v3\n{}", "\ts_nop 0\n".repeat(32));
        assert_eq!(of(Driver::Radv, &format!("BB0:\n{few}BB1:\n{many}")), Some(50.0));
        assert_eq!(of(Driver::Honeykrisp, &many), None);
    }
}
