//! Tests of the tables and plots from rows.

use super::visit::Visit;
use super::{cache_formats, growth, output, root, tables};

#[test]
fn committed_tables_and_plots_are_what_the_committed_rows_give() {
    let files = output::Wanted::committed(&root()).and_then(|wanted| wanted.files());
    for (path, text) in files.expect("rows") {
        let same = std::fs::read_to_string(&path).is_ok_and(|committed| committed == text);
        assert!(same, "{} is not what the rows give: run `cargo run -p report`", path.display());
    }
}

const GPU: &str = r#"
{"bench":"visit","date":"2030-01-02","commit":"abc","dirty":true}
{"bench":"facts","device":"A GPU","driver":"D 1","backend":"vulkan","device_type":"DiscreteGpu","subgroups":"32 to 32"}
{"bench":"check","what":"split keys","detail":"right, error 0.13 of the tolerance"}
{"bench":"tune","what":"attention 1x8","ms":0.25,"value":1.5,"detail":"tiles of 32 x 2"}
{"bench":"ceilings","what":"copy","value":2999.6,"unit":"GB/s","form":"unknown fields do no harm"}
{"bench":"kernels","what":"fused","shape":"1×8×512×64","heads":8,"q_len":512,"kv_len":512,"head_dim":64,"mask":"causal","dtype":"f32","ms":0.5,"floor_ms":0.2,"bound":"arithmetic"}
{"bench":"kernels","what":"backward of q","shape":"1×8×512×64","heads":8,"q_len":512,"kv_len":512,"head_dim":64,"mask":"causal","dtype":"f32","ms":2.0}
{"bench":"kernels","what":"project","shape":"512×512×512 out,in","dtype":"f32","ms":1.0,"floor_ms":0.3,"bound":"arithmetic"}
{"bench":"kernels","what":"project","shape":"4096×4096×4096 out,in","dtype":"f32","ms":1.0,"floor_ms":0.5,"bound":"arithmetic"}
{"bench":"torch","what":"sdpa math","heads":8,"kv_heads":8,"q_len":512,"kv_len":512,"head_dim":64,"value_dim":64,"mask":"causal","dtype":"f32","ms":2.0,"backend":"cuda"}
{"bench":"torch","what":"sdpa efficient","heads":8,"kv_heads":8,"q_len":512,"kv_len":512,"head_dim":64,"value_dim":64,"mask":"causal","dtype":"f32","ms":0.25,"backend":"cuda"}
{"bench":"torch","what":"sdpa flash","heads":8,"kv_heads":8,"q_len":512,"kv_len":512,"head_dim":64,"value_dim":64,"mask":"causal","dtype":"f16","ms":0.1,"backend":"cuda"}
{"bench":"torch","what":"sdpa math","heads":8,"kv_heads":8,"q_len":512,"kv_len":512,"head_dim":64,"value_dim":64,"mask":"causal","dtype":"f32","ms":0.01,"backend":"cpu"}
{"bench":"tests","what":"passed","value":300}
{"bench":"tests","what":"failed","detail":"fused::wide"}
{"bench":"part","what":"torch","detail":"timed out"}
"#;

#[test]
fn a_section_has_each_figure_beside_its_ceiling_and_the_fastest_of_pytorch_on_the_same_problem() {
    let visit = Visit::parse("gpu".into(), GPU).expect("rows");
    let brief = tables::brief(&visit);
    assert!(brief.contains("0.500 ms, 40 % of ceiling, 0.50 of PyTorch (sdpa efficient)"), "{brief}");
    let text = tables::results(&[visit], false);
    for line in [
        "## 2030-01-02: A GPU",
        "Driver D 1, vulkan, commit abc with uncommitted changes.",
        "| split keys | right, error 0.13 of the tolerance |",
        "| attention 1x8 | 0.250 | 1.50 | tiles of 32 x 2 |",
        "| copy | 3000 | GB/s |",
        "| kernels | fused | 1×8×512×64 causal | 0.500 | 0.200 | arithmetic | 40 % | 0.80 | 0.250 (efficient) | 0.50 | – |",
        "| kernels | backward of q | 1×8×512×64 causal | 2.00 | – | – | – | – | – | – | – |",
        "Tests: 300 passed.",
        "- failed: `fused::wide`",
        "- not complete: torch (timed out)",
    ] {
        assert!(text.lines().any(|l| l == line), "no line {line:?} in\n{text}");
    }
}

/// A row of a device without robust access stands in its own table alone.
#[test]
fn unchecked_rows_stand_apart() {
    let fast = GPU.lines().find(|line| line.contains("\"fused\"")).expect("a row");
    let fast = fast.replace("\"ms\":0.5", "\"ms\":0.4,\"unchecked\":true");
    let alone = fast.replace("causal", "none");
    let visit = |text: &str| Visit::parse("gpu".into(), text).expect("rows");
    let all = visit(&format!("{GPU}{fast}\n{alone}\n"));
    assert_eq!(tables::brief(&all), tables::brief(&visit(GPU)));
    let (before, after) = (tables::results(&[visit(GPU)], false), tables::results(&[all], false));
    let lines = [
        "| kernels | fused | 1×8×512×64 causal | 0.400 | 0.500 | 1.25 |",
        "| kernels | fused | 1×8×512×64 | 0.400 | – | – |",
    ];
    let added: Vec<_> = after.lines().filter(|line| !before.lines().any(|old| old == *line)).collect();
    assert_eq!(added[added.len() - 2..], lines, "{added:?}");
    assert_eq!(after.lines().count() - before.lines().count(), 7, "{after}");
}

#[test]
fn software_drivers_have_no_place_among_results() {
    let software = GPU.replace("DiscreteGpu", "Cpu");
    let visits = [Visit::parse("software".into(), &software).expect("rows")];
    assert!(!tables::results(&visits, false).contains("A GPU"));
    let asked = tables::results(&visits, true);
    assert!(asked.contains("**Software, says nothing about GPUs.**"), "{asked}");
    // A processor's PyTorch is no yardstick for a GPU, and a GPU's is none for a processor.
    assert!(asked.contains("0.0100 (math)"), "{asked}");
}

#[test]
fn growth_is_drawn_with_the_exponents_of_the_rows() {
    let mut rows = GPU.to_string();
    for length in [256, 512] {
        rows += &format!(
            r#"{{"bench":"scaling","what":"fused","mask":"window 256","dtype":"f32","q_len":{length},"kv_len":{length},"ms":{length},"bytes":0}}"#
        );
        rows.push('\n');
    }
    rows += r#"{"bench":"scaling","what":"fused","mask":"window 256","dtype":"f32","value":1.25,"unit":"time exponent"}"#;
    let draw = |rows| growth::plot(&Visit::parse("gpu".into(), rows).expect("rows")).expect("a picture");
    assert!(draw(&rows).expect("two lengths").contains("fused window 256 ~ n^1.25"));
    assert!(draw(GPU).is_none());
}

#[test]
fn a_bad_row_is_named_by_its_line() {
    let error = Visit::parse("rows".into(), "{\"bench\":\"kernels\"}\n\n{\"ms\":\"soon\"}\n")
        .err()
        .expect("an error");
    assert!(error.starts_with("3: "), "{error}");
}

const FORMATS: &str = "\
1877 tokens
cache                perplexity     × of f32  bytes a token ms a token
f32                     27.6481       1.0000          46080       57.0
q4                      33.5375       1.2130           7200       40.0
q4-rotated              29.1507       1.0543           7200       44.7

error of keys / of values, % of their size
layer                     q4           q4-rotated
";

#[test]
fn the_first_table_of_chat_has_the_cache_formats() {
    let format =
        |name: &str, perplexity, bytes| cache_formats::Format { name: name.into(), perplexity, bytes };
    let expected = [
        format("f32", 27.6481, 46080.0),
        format("q4", 33.5375, 7200.0),
        format("q4-rotated", 29.1507, 7200.0),
    ];
    assert_eq!(cache_formats::parse(FORMATS).expect("a table"), expected);
    let picture = cache_formats::plot(FORMATS).expect("a picture");
    assert!(expected.iter().all(|format| picture.contains(&format.name)), "{picture}");
}

#[test]
fn text_without_a_whole_table_of_cache_formats_is_refused() {
    let error = |text: &str| cache_formats::plot(text).expect_err("an error").to_string();
    assert!(error("1877 tokens").contains("no line begins with `cache`"));
    assert!(error(&FORMATS.replace("33.5375", "NaN")).starts_with("4: "));
    assert!(error(&FORMATS.replace("f32   ", "f16   ")).contains("no row of f32"));
}

#[test]
fn names_of_cache_formats_at_close_points_do_not_overlap() {
    let points = [(400, 300), (400, 300), (400, 308), (410, 300)];
    let places = cache_formats::places(&points, &["f16", "bf16", "q4-rotated", "q4"]).expect("places");
    for (n, place) in places.iter().enumerate() {
        assert!(!places[..n].iter().any(|other| other.overlaps(place)), "{places:?}");
    }
}
