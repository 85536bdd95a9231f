//! The command line.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;

use minilm::{HEADS, LAYERS};

use crate::choices::names;

const HELP: &str = "\
Shows attention weights in a window. egui and attention share one wgpu device.

usage: viewer [OPTIONS]

options:
  --tab masks|minilm  the tab to show first [default: masks]
  --preset NAME       a preset mask or score function; may be repeated
  --score-mod FILE    a score function in WGSL
  --sentence TEXT     the sentence for all-MiniLM-L6-v2; selects its tab
  --layer N           the layer of all-MiniLM-L6-v2, from 0 [default: 0]
  --head N            the head of all-MiniLM-L6-v2, from 0 [default: 0]
  --screenshot PATH   write a PNG of the window, then exit
  -h, --help          print this text

environment:
  WGPU_ATTENTION_CACHE  folder for the weights [default: wgpu-attention in the user's cache]
  WGPU_BACKEND          vulkan, metal, dx12 or gl, as for every wgpu program";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tab {
    #[default]
    Masks,
    Minilm,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    pub tab: Tab,
    pub presets: Vec<String>,
    /// The text of the score function.
    pub score_mod: Option<String>,
    pub sentence: Option<String>,
    pub layer: usize,
    pub head: usize,
    pub screenshot: Option<PathBuf>,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    pub fn read(from: impl IntoIterator<Item = OsString>) -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut all = Arguments::default();
        let mut tab = None;
        let mut parser = lexopt::Parser::from_iter(from);
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}\n\npresets:");
                    names().for_each(|name| println!("  {name}"));
                    return Ok(None);
                }
                Long("tab") => tab = Some(parser.value()?.parse_with(tab_of)?),
                Long("preset") => all.presets.push(parser.value()?.parse_with(preset)?),
                Long("score-mod") => all.score_mod = Some(read_text(parser.value()?.into())?),
                Long("sentence") => all.sentence = Some(parser.value()?.string()?),
                Long("layer") => all.layer = parser.value()?.parse_with(|n| below(n, LAYERS))?,
                Long("head") => all.head = parser.value()?.parse_with(|n| below(n, HEADS))?,
                Long("screenshot") => all.screenshot = Some(parser.value()?.into()),
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        all.tab = tab.unwrap_or(if all.sentence.is_some() { Tab::Minilm } else { Tab::Masks });
        Ok(Some(all))
    }
}

fn tab_of(name: &str) -> Result<Tab, String> {
    match name {
        "masks" => Ok(Tab::Masks),
        "minilm" => Ok(Tab::Minilm),
        _ => Err("the tabs are masks and minilm".to_owned()),
    }
}

fn preset(name: &str) -> Result<String, String> {
    match names().any(|known| known == name) {
        true => Ok(name.to_owned()),
        false => Err(format!("the presets are {}", names().collect::<Vec<_>>().join(", "))),
    }
}

fn below(n: &str, end: usize) -> Result<usize, String> {
    n.parse().ok().filter(|n| *n < end).ok_or(format!("expected a number from 0 to {}", end - 1))
}

fn read_text(path: PathBuf) -> Result<String, String> {
    std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &[&str]) -> Result<Arguments, String> {
        let all = std::iter::once("viewer").chain(arguments.iter().copied()).map(OsString::from);
        Arguments::read(all).map(Option::unwrap_or_default).map_err(|e| e.to_string())
    }

    #[test]
    fn options_are_read() {
        let read = read(&["--preset", "alibi", "--preset", "causal", "--layer", "5", "--head", "11"]);
        let presets = vec!["alibi".to_owned(), "causal".to_owned()];
        assert_eq!(read, Ok(Arguments { presets, layer: 5, head: 11, ..Arguments::default() }));
    }

    #[test]
    fn sentences_select_their_tab() {
        let tab = |arguments: &[&str]| read(arguments).map(|all| all.tab);
        assert_eq!(tab(&["--sentence", "Yes"]), Ok(Tab::Minilm));
        assert_eq!(tab(&["--sentence", "Yes", "--tab", "masks"]), Ok(Tab::Masks));
    }

    #[test]
    fn unusable_options_are_errors() {
        let error = |arguments: &[&str]| read(arguments).expect_err("an error");
        assert!(error(&["--layer", "6"]).ends_with("expected a number from 0 to 5"));
        assert!(error(&["--preset", "casual"]).contains("the presets are causal, sliding"));
        assert!(error(&["--tab", "x"]).ends_with("the tabs are masks and minilm"));
        assert!(error(&["--score-mod", "no/such"]).starts_with("cannot read no/such: "));
        assert!(error(&["--nothing"]).ends_with("see --help"));
        assert!(error(&["word"]).ends_with("see --help"));
    }
}
