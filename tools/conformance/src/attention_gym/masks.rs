//! The library's mask or score function for each of attention-gym's.

use wgpu_attention::mask::{DeviceMask, Pattern, ScoreMod};
use wgpu_attention::presets::{self, MaskPreset, ScorePreset};
use wgpu_attention::{DType, Gpu, HostTensor, wgpu};

use crate::case::Case;
use crate::outcome::Failed;
use crate::tensor::Placed;

/// A mask or a score function, with its tensors. It is a preset, or else a rule of a mask.
pub struct Function {
    rule: Rule,
    /// The tensor of the rule.
    tensor: Option<Placed>,
    mask: Option<MaskPreset>,
    score: Option<ScorePreset>,
    text: Option<(&'static str, f32)>,
    tables: Vec<wgpu::Buffer>,
    pub softcap: Option<f64>,
}

/// The rules that attention-gym's functions need.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    All,
    Causal,
    Sliding(usize),
    Dilated { window: usize, dilation: usize },
    Global(usize),
    Local(usize),
    Prefix,
    Packed,
    Tree,
    Alibi,
    Padding,
}

impl Function {
    pub fn none() -> Self {
        Function {
            rule: Rule::All,
            tensor: None,
            mask: None,
            score: None,
            text: None,
            tables: Vec::new(),
            softcap: None,
        }
    }

    pub fn new(gpu: &Gpu, case: &Case) -> Result<Self, Failed> {
        let mut function = Function::none();
        if case.flag("rule") {
            function.rule = rule(case)?;
            function.tensor = rule_tensor(gpu, case, function.rule)?;
            function.softcap = case.number("cap");
            return Ok(function);
        }
        let name = case.text("function").unwrap_or("vsa");
        if ["document", "packed_causal_document", "batchify"].contains(&name) || case.flag("causal") {
            function.rule = Rule::Causal;
        }
        if name == "vsa" {
            function.rule = Rule::Padding;
            function.tensor = rule_tensor(gpu, case, function.rule)?;
        }
        function.mask = mask_preset(case, name)?;
        function.score = score_preset(case, name)?;
        let offset = case.number("offset").unwrap_or_default() as f32;
        function.text = match name {
            "relu" => Some((RELU, offset)),
            "sigmoid" => Some((SIGMOID, offset)),
            _ => None,
        };
        let tables = function.mask.as_ref().map(MaskPreset::tables);
        let tables = tables.or(function.score.as_ref().map(ScorePreset::tables)).unwrap_or_default();
        function.tables = gpu.upload_tables(tables)?;
        Ok(function)
    }

    pub fn mask(&self) -> Result<DeviceMask<'_>, Failed> {
        let tensor = || self.tensor.as_ref().map(Placed::view).ok_or_else(|| Failed("no tensor".into()));
        let mut mask = match self.rule {
            Rule::All => DeviceMask::none(),
            Rule::Causal => DeviceMask::causal(),
            Rule::Sliding(window) => DeviceMask::causal().window(window, 0),
            Rule::Dilated { window, dilation } => {
                DeviceMask::none().window(window, window).pattern(Pattern::Dilated { dilation })
            }
            Rule::Global(window) => DeviceMask::none().window(window, window).globals(tensor()?),
            Rule::Local(block) => DeviceMask::causal().pattern(Pattern::Local { block }),
            Rule::Prefix => DeviceMask::causal().prefix(tensor()?),
            Rule::Packed => DeviceMask::causal().packed(tensor()?, tensor()?),
            Rule::Tree => DeviceMask::none().tree(tensor()?),
            Rule::Alibi => DeviceMask::none().alibi(tensor()?),
            Rule::Padding => DeviceMask::none().key_padding_mask(tensor()?),
        };
        if let Some(preset) = &self.mask {
            mask = mask.mask_mod(preset.bound(&self.tables));
        }
        if let Some(preset) = &self.score {
            mask = mask.score_mod(preset.bound(&self.tables));
        }
        if let Some((text, offset)) = self.text {
            mask = mask.score_mod(ScoreMod::new(text)?.uniforms(&offset.to_ne_bytes()));
        }
        Ok(mask)
    }

    /// Makes the gradient of a learned table.
    pub fn d_table(&self, gpu: &Gpu) -> Result<Option<Placed>, Failed> {
        let learned = self.score.as_ref().filter(|preset| preset.name().starts_with("graphormer"));
        let shape = learned.map(|preset| preset.tables()[0].shape());
        Ok(shape.map(|shape| Placed::output(gpu, DType::F32, shape)).transpose()?)
    }
}

const RELU: &str = "struct Uniforms { offset: f32 }
fn score_mod(score: f32, at: At) -> f32 { return log(max(score, 0.0) + uniforms().offset); }";

const SIGMOID: &str = "struct Uniforms { offset: f32 }
fn score_mod(score: f32, at: At) -> f32 { return log(1.0 / (1.0 + exp(-score)) + uniforms().offset); }";

fn rule(case: &Case) -> Result<Rule, Failed> {
    Ok(match case.text("function").unwrap_or_default() {
        "causal" => Rule::Causal,
        "sliding_window" => Rule::Sliding(case.count("window")?),
        "dilated_sliding_window" => {
            Rule::Dilated { window: case.count("window")?, dilation: case.count("dilation")? }
        }
        "global_sliding_window" => Rule::Global(case.count("window")?),
        "batchify" => Rule::Local(case.count("block")?),
        "prefix_lm" => Rule::Prefix,
        "document" | "packed_causal_document" => Rule::Packed,
        "jetspec_tree" => Rule::Tree,
        "alibi" => Rule::Alibi,
        "tanh_softcap" => Rule::All,
        other => return Err(Failed(format!("no rule for {other}"))),
    })
}

fn rule_tensor(gpu: &Gpu, case: &Case, rule: Rule) -> Result<Option<Placed>, Failed> {
    let place = |data: &[f64], dtype, shape| Ok(Some(Placed::new(gpu, data, dtype, shape)?));
    let keys = case.count("keys")?;
    match rule {
        Rule::Global(_) => {
            let globals: Vec<f64> = globals(case)?.iter().map(|seen| f64::from(*seen)).collect();
            place(&globals, DType::Bool, [1, 1, 1, keys])
        }
        Rule::Prefix => place(&[case.count("prefix")? as f64], DType::U32, [1; 4]),
        Rule::Packed => {
            let starts = starts(case)?;
            let starts: Vec<f64> = starts.iter().map(|n| *n as f64).collect();
            place(&starts, DType::U32, [1, 1, 1, starts.len()])
        }
        Rule::Tree => {
            let parents = case.list("parents")?;
            place(&ancestors(&parents), DType::Bool, [1, 1, parents.len(), parents.len()])
        }
        Rule::Alibi => {
            let heads = case.count("heads")?;
            let slopes: Vec<f64> = presets::alibi_slopes(heads).iter().map(|x| f64::from(*x)).collect();
            place(&slopes, DType::F32, [1, heads, 1, 1])
        }
        Rule::Padding => {
            let (sizes, tile) = (case.input("sizes")?, case.count("tile")?);
            let seen: Vec<f64> =
                (0..keys).map(|key| f64::from(((key % tile) as f64) < sizes.data[key / tile])).collect();
            place(&seen, DType::Bool, [1, 1, 1, keys])
        }
        _ => Ok(None),
    }
}

/// Returns, for each node of a tree, which nodes it sees: itself and its ancestors. Node 0 is the
/// root.
fn ancestors(parents: &[usize]) -> Vec<f64> {
    let nodes = parents.len();
    let mut seen = vec![0.0; nodes * nodes];
    for node in 0..nodes {
        let mut at = node;
        while at > 0 {
            seen[node * nodes + at] = 1.0;
            at = parents[at];
        }
        seen[node * nodes] = 1.0;
    }
    seen
}

fn globals(case: &Case) -> Result<Vec<bool>, Failed> {
    let every = case.count("every")?;
    Ok((0..case.count("keys")?).map(|key| key.is_multiple_of(every)).collect())
}

/// The starts of documents, and the end of the last one.
fn starts(case: &Case) -> Result<Vec<usize>, Failed> {
    let mut starts = vec![0];
    for length in case.list("lengths")? {
        starts.push(starts[starts.len() - 1] + length);
    }
    Ok(starts)
}

/// The document of each token.
fn documents(case: &Case) -> Result<Vec<u32>, Failed> {
    let lengths = case.list("lengths")?;
    Ok(lengths.iter().enumerate().flat_map(|(n, length)| vec![n as u32; *length]).collect())
}

fn mask_preset(case: &Case, name: &str) -> Result<Option<MaskPreset>, Failed> {
    let [queries, keys] = [case.count("queries")?, case.count("keys")?];
    let row = [1, 1, 1, keys];
    Ok(Some(match name {
        "causal" => presets::causal()?,
        "sliding_window" => presets::sliding(case.count("window")?)?,
        "dilated_sliding_window" => presets::dilated(case.count("window")?, case.count("dilation")?)?,
        "global_sliding_window" => {
            presets::global_sliding(case.count("window")?, HostTensor::new(&globals(case)?, row))?
        }
        "batchify" => presets::local(case.count("block")?)?,
        "prefix_lm" => presets::prefix_lm(HostTensor::new(&[case.count("prefix")? as u32], [1; 4]))?,
        "document" | "packed_causal_document" => presets::documents(HostTensor::new(&documents(case)?, row))?,
        "shared_prefix" => {
            let (documents, prompts) = (documents(case)?, case.list("prompts")?);
            let prompts: Vec<u32> = documents.iter().map(|n| prompts[*n as usize] as u32).collect();
            presets::shared_prefix(HostTensor::new(&documents, row), HostTensor::new(&prompts, row))?
        }
        "vision_cross_attention" => {
            let intervals: Vec<u32> = case.list("intervals")?.iter().map(|n| *n as u32).collect();
            let intervals = HostTensor::new(&intervals, [1, 1, intervals.len() / 2, 2]);
            presets::flamingo(intervals, case.count("picture")?)?
        }
        "block_diffusion" => presets::block_diffusion(queries / 2, case.count("block")?)?,
        "jetspec_tree" => {
            let parents = case.list("parents")?;
            let parents: Vec<_> =
                parents.iter().enumerate().map(|(n, parent)| (n > 0).then_some(*parent as u32)).collect();
            presets::tree(&parents, 1)?
        }
        "jetspec_training" => presets::draft_blocks(case.count("prefix")?, case.count("block")?)?,
        "vsa" => {
            let (listed, tile) = (case.input("tiles")?, case.count("tile")?);
            let [batch, heads, tiles, count] = listed.four();
            let mut selected = vec![false; batch * heads * tiles * tiles];
            for (n, tile) in listed.data.iter().enumerate() {
                selected[n / count * tiles + *tile as usize] = true;
            }
            presets::selected_tiles(HostTensor::new(&selected, [batch, heads, tiles, tiles]), tile)?
        }
        _ => return grid_preset(case, name),
    }))
}

/// The masks of pictures and videos.
fn grid_preset(case: &Case, name: &str) -> Result<Option<MaskPreset>, Failed> {
    Ok(Some(match name {
        "natten" => presets::natten([case.count("side")?; 2], case.axes("kernel")?, [1, 1])?,
        "tiled_natten" => {
            presets::tiled_natten(case.axes::<2>("canvas")?, case.axes("kernel")?, case.axes("tile")?)?
        }
        "morton_natten" => presets::morton_natten(case.count("side")?, case.axes("kernel")?)?,
        "sta_2d" => presets::sliding_tiles(
            case.axes::<2>("canvas")?,
            case.axes("kernel")?,
            case.axes("tile")?,
            case.count("text")?,
        )?,
        "sta_3d" => presets::sliding_tiles(
            case.axes::<3>("canvas")?,
            case.axes("kernel")?,
            case.axes("tile")?,
            case.count("text")?,
        )?,
        "svg_spatial" => {
            let (frame, rounded) = (case.count("frame")?, case.count("rounded")?);
            presets::svg_spatial(
                case.count("prompt")?,
                frame,
                2 * frame / rounded * rounded,
                case.flag("sink"),
            )?
        }
        "svg_temporal" => {
            let (frame, frames) = (case.count("frame")?, case.count("frames")?);
            presets::svg_temporal(case.count("prompt")?, frame, 2 * frame / frames)?
        }
        _ => return Ok(None),
    }))
}

fn score_preset(case: &Case, name: &str) -> Result<Option<ScorePreset>, Failed> {
    let heads = case.count("heads")?;
    let table = || case.input("table").map(|t| t.data.iter().map(|x| *x as f32).collect::<Vec<_>>());
    Ok(Some(match name {
        "alibi" => presets::alibi(HostTensor::new(&presets::alibi_slopes(heads), [1, heads, 1, 1]))?,
        "tanh_softcap" => presets::softcap(case.count("cap")? as f32)?,
        "sandwich" => presets::sandwich(heads, case.count("width")?, case.count("keys")?)?,
        "graphormer_spatial" => {
            let (table, t) = (table()?, case.input("distances")?);
            let distances: Vec<u32> = t.data.iter().map(|n| *n as u32).collect();
            let table = HostTensor::new(&table, [1, heads, 1, table.len() / heads]);
            presets::graphormer(table, HostTensor::new(&distances, [t.shape[0], 1, t.shape[1], t.shape[2]]))?
        }
        "graphormer_edges" => {
            let (table, t) = (table()?, case.input("types")?);
            let [.., edges] = t.four();
            let hops = &case.input("hops")?.data;
            let of_edge = |(n, kind): (usize, &f64)| {
                if ((n % edges) as f64) < hops[n / edges] { *kind as u32 } else { u32::MAX }
            };
            let paths: Vec<u32> = t.data.iter().enumerate().map(of_edge).collect();
            let table = HostTensor::new(&table, [1, heads, edges, table.len() / heads / edges]);
            presets::graphormer_edges(table, HostTensor::new(&paths, t.four()))?
        }
        "gelu_tanh" => {
            presets::gelu(case.number("offset").ok_or_else(|| Failed("no offset".into()))? as f32)?
        }
        _ => return Ok(None),
    }))
}
