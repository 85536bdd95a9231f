//! `scripts/prose`: finds sentences that break the rules of plain words.

use std::ffi::OsString;
use std::fs;
use std::process::Command;

use crate::error::{Result, failed, refused};
use crate::process;
use crate::repo::Repo;

const USAGE: &str = "\
scripts/prose [PATH...]: checks comments and Markdown against the rules of plain words.


Rules: a sentence has at most 20 words; it does not begin with What, Those, Whether, Of, Which or That; a comment's first
sentence does not begin with How or Where; words that readers must decode are avoided (xtask/src/prose.rs lists them); a
comment ends at column 100; a commit's subject has at most 72 characters. xtask/prose.txt lists exceptions with reasons.
Exit status 1 if a rule is broken, or if an exception has no use.
";

/// Exceptions: a path, a tab, a part of the fault's text, a tab, the reason.
const EXCEPTIONS: &str = include_str!("../prose.txt");

const MOST_WORDS: usize = 20;
const MOST_COLUMNS: usize = 100;
const MOST_SUBJECT: usize = 72;
/// The first commit whose subject the lint checks is the one behind this.
const SUBJECTS_SINCE: &str = "cd59efd67475d247554cc1193e29ac52d26ddd87";

/// A sentence does not begin with these words.
const OPENERS: [&str; 6] = ["What", "Those", "Whether", "Of", "Which", "That"];
/// A comment's first sentence does not begin with these words either.
const FIRST_OPENERS: [&str; 2] = ["How", "Where"];

/// Words that readers must decode, in lower case.
const UNPLAIN: [&str; 12] = [
    "in fours",
    "put aside",
    "once more",
    "anew",
    "of its own",
    "of their own",
    "of one's own",
    "but for",
    "mend",
    "mended",
    "take turns",
    "beside",
];

/// Files that programs write.
const SKIPPED: [&str; 5] = [
    "benches/RESULTS.md",
    "benches/SHADERS.md",
    "benches/PREDICTIONS.md",
    "benches/COMPILED.md",
    "docs/doctor/",
];

/// A broken rule.
#[derive(Debug, PartialEq)]
struct Fault {
    line: usize,
    rule: Rule,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Opener,
    Length,
    Word,
    Width,
    Subject,
}

impl Rule {
    fn name(self) -> &'static str {
        match self {
            Rule::Opener => "opener",
            Rule::Length => "length",
            Rule::Word => "word",
            Rule::Width => "width",
            Rule::Subject => "subject",
        }
    }
}

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    let mut paths = Vec::new();
    let mut parser = lexopt::Parser::from_args(words);
    while let Some(argument) = parser.next()? {
        match argument {
            lexopt::Arg::Short('h') | lexopt::Arg::Long("help") => {
                print!("{USAGE}");
                return Ok(());
            }
            lexopt::Arg::Value(path) => paths.push(path),
            other => return Err(refused(other.unexpected())),
        }
    }
    let whole = paths.is_empty();
    let mut git = Command::new("git");
    git.current_dir(&repo.root).args(["ls-files", "--"]).args(&paths);
    let listed = process::output(&mut git)?;
    let is_checked = |path: &&str| {
        let known = [".rs", ".wgsl", ".md"].iter().any(|end| path.ends_with(end));
        known && !SKIPPED.iter().any(|skipped| path.starts_with(skipped))
    };
    let mut faults = Vec::new();
    for path in listed.lines().filter(is_checked) {
        let file = repo.root.join(path);
        let Ok(text) = fs::read_to_string(&file) else { continue };
        faults.extend(check(path, &text).into_iter().map(|fault| (path.to_string(), fault)));
    }
    if whole {
        faults.extend(subjects(repo)?.into_iter().map(|fault| ("commit".to_string(), fault)));
    }
    let stale = excepted(&mut faults, EXCEPTIONS)?;
    for (path, Fault { line, rule, text }) in &faults {
        println!("{path}:{line}: {}: {text}", rule.name());
    }
    if whole {
        stale.iter().for_each(|line| println!("xtask/prose.txt: no sentence needs: {line}"));
        if !stale.is_empty() {
            return Err(failed(format!("{} exceptions have no use", stale.len())));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(failed(format!("{} faults", faults.len()))) }
}

/// Removes the faults that an exception names, and returns the exceptions that name none.
fn excepted<'e>(faults: &mut Vec<(String, Fault)>, exceptions: &'e str) -> Result<Vec<&'e str>> {
    let mut stale = Vec::new();
    for line in exceptions.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let [path, part, _reason] = line.split('\t').collect::<Vec<_>>()[..] else {
            return Err(failed(format!("xtask/prose.txt: no path, part and reason: {line}")));
        };
        let before = faults.len();
        faults.retain(|(of, fault)| of != path || !fault.text.contains(part));
        if faults.len() == before {
            stale.push(line);
        }
    }
    Ok(stale)
}

fn subjects(repo: &Repo) -> Result<Vec<Fault>> {
    let mut git = Command::new("git");
    // A shallow clone has no such commit, and then nothing to check.
    git.current_dir(&repo.root).args(["log", "--format=%s", &format!("{SUBJECTS_SINCE}..HEAD")]);
    let Ok(log) = process::output(&mut git) else { return Ok(Vec::new()) };
    let long = log.lines().filter(|subject| subject.chars().count() > MOST_SUBJECT);
    Ok(long.map(|subject| Fault { line: 0, rule: Rule::Subject, text: subject.to_string() }).collect())
}

/// A comment of several lines, or a page.
struct Block<'t> {
    line: usize,
    lines: Vec<&'t str>,
}

/// The comment's mark and its text, if the line is a comment.
fn comment(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let mark = ["///", "//!", "//"].into_iter().find(|mark| line.starts_with(mark))?;
    let text = &line[mark.len()..];
    (!text.starts_with('/')).then_some((mark, text))
}

fn blocks<'t>(path: &str, text: &'t str) -> Vec<Block<'t>> {
    if path.ends_with(".md") {
        return vec![Block { line: 1, lines: text.lines().collect() }];
    }
    let mut blocks: Vec<Block> = Vec::new();
    let mut last = None;
    for (n, line) in text.lines().enumerate() {
        let Some((mark, text)) = comment(line) else {
            last = None;
            continue;
        };
        match blocks.last_mut() {
            Some(block) if last == Some(mark) => block.lines.push(text),
            _ => blocks.push(Block { line: n + 1, lines: vec![text] }),
        }
        last = Some(mark);
    }
    blocks
}

fn check(path: &str, text: &str) -> Vec<Fault> {
    let mut faults = Vec::new();
    if !path.ends_with(".md") {
        let mut in_code = false;
        for (n, line) in text.lines().enumerate() {
            let Some((_, said)) = comment(line) else { continue };
            if said.trim_start().starts_with("```") {
                in_code = !in_code;
            }
            let columns = line.chars().count();
            if columns > MOST_COLUMNS && !in_code && !line.contains("http") {
                faults.push(Fault { line: n + 1, rule: Rule::Width, text: format!("{columns} columns") });
            }
        }
    }
    let is_page = path.ends_with(".md");
    for block in blocks(path, text) {
        for (n, (line, paragraph)) in paragraphs(&block).into_iter().enumerate() {
            for (m, sentence) in sentences(&paragraph).into_iter().enumerate() {
                let is_first = n == 0 && m == 0 && !is_page;
                let mut fault = |rule| faults.push(Fault { line, rule, text: sentence.clone() });
                let first = sentence.split([' ', ',']).next().unwrap_or_default();
                let question = sentence.ends_with('?');
                if !question && (OPENERS.contains(&first) || is_first && FIRST_OPENERS.contains(&first)) {
                    fault(Rule::Opener);
                }
                if sentence.split_whitespace().filter(|word| is_word(word)).count() > MOST_WORDS {
                    fault(Rule::Length);
                }
                if unplain(&sentence).is_some() {
                    fault(Rule::Word);
                }
            }
        }
    }
    faults
}

fn is_word(word: &str) -> bool {
    word.chars().any(char::is_alphanumeric)
}

/// The first words that readers must decode.
fn unplain(sentence: &str) -> Option<&'static str> {
    let plain: String = sentence.to_lowercase().chars().map(|c| if is_letter(c) { c } else { ' ' }).collect();
    let words = format!(" {} ", plain.split_whitespace().collect::<Vec<_>>().join(" "));
    UNPLAIN.into_iter().find(|unplain| words.contains(&format!(" {unplain} ")))
}

fn is_letter(c: char) -> bool {
    c.is_alphanumeric() || c == '\''
}

/// The paragraphs and headings of a block with the line of each, without code and tables.
fn paragraphs(block: &Block) -> Vec<(usize, String)> {
    let mut paragraphs: Vec<(usize, String)> = Vec::new();
    let (mut in_code, mut in_names, mut goes_on) = (false, false, false);
    for (n, line) in block.lines.iter().enumerate() {
        let text = line.trim();
        let text = text.strip_prefix('>').unwrap_or(text).trim_start();
        if text.starts_with("```") {
            in_code = !in_code;
            goes_on = false;
            continue;
        }
        // A line that is indented by four is code as well, and columns that are aligned are a
        // table.
        // Programs read the names that a shader needs and gives, up to an empty line.
        in_names |= ["Needs:", "Gives:"].iter().any(|label| text.starts_with(label));
        in_names &= !text.is_empty();
        // A heading is a sentence.
        if !in_names && let Some(title) = text.strip_prefix('#') {
            paragraphs.push((block.line + n, title.trim_start_matches('#').trim().to_string()));
            goes_on = false;
            continue;
        }
        let is_table = text.starts_with(['|', '<']) || text.contains("   ") || in_names;
        if in_code || is_table || text.is_empty() {
            goes_on = false;
            continue;
        }
        let item = ["- ", "* "].iter().find_map(|mark| text.strip_prefix(mark)).or_else(|| {
            let (number, rest) = text.split_once(". ")?;
            number.parse::<u32>().ok().map(|_| rest)
        });
        match paragraphs.last_mut() {
            Some((_, paragraph)) if goes_on && item.is_none() => {
                paragraph.push(' ');
                paragraph.push_str(text);
            }
            _ => paragraphs.push((block.line + n, item.unwrap_or(text).to_string())),
        }
        goes_on = true;
    }
    paragraphs
}

/// The sentences of a paragraph, with `code` in place of code and without the addresses of links.
fn sentences(paragraph: &str) -> Vec<String> {
    let plain = without_code(paragraph);
    let mut sentences = Vec::new();
    let mut sentence = String::new();
    let mut words = plain.split_whitespace().peekable();
    while let Some(word) = words.next() {
        sentence.push_str(word);
        let ends = word.trim_end_matches([')', '"', '*', '_']).ends_with(['.', '?', '!']);
        let next_starts = words.peek().is_none_or(|next| {
            next.trim_start_matches(['(', '"', '*', '[', '_'])
                .starts_with(|c: char| c.is_uppercase() || c == '`')
        });
        let is_short = ["e.g.", "i.e.", "al.", "vs.", "etc."].contains(&word);
        if ends && next_starts && !is_short {
            sentences.push(std::mem::take(&mut sentence));
        } else {
            sentence.push(' ');
        }
    }
    if !sentence.trim().is_empty() {
        sentences.push(sentence.trim().to_string());
    }
    sentences
}

/// `a `b c` [d](e)` → `a `code` d`.
fn without_code(text: &str) -> String {
    let mut out = String::new();
    for (n, part) in text.split('`').enumerate() {
        if n % 2 == 0 {
            out.push_str(part);
        } else {
            out.push_str("`code`");
        }
    }
    while let Some(at) = out.find("](") {
        let end = out[at..].find(')').map_or(out.len(), |end| at + end + 1);
        out.replace_range(at..end, "");
    }
    out.replace(['[', ']'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<Rule> {
        check(path, text).into_iter().map(|fault| fault.rule).collect()
    }

    #[test]
    fn planted_faults_are_found() {
        assert_eq!(rules("a.rs", "/// What kernels have of a mod.\nfn f() {}\n"), [Rule::Opener]);
        assert_eq!(rules("a.rs", "    // Kernels are put aside.\n"), [Rule::Word]);
        let long = format!("# A\n\nThe {}word.\n", "long ".repeat(20));
        assert_eq!(rules("a.md", &long), [Rule::Length]);
        assert_eq!(rules("a.wgsl", &format!("// {}\n", "x".repeat(98))), [Rule::Width]);
        assert_eq!(rules("a.rs", "// Where f16 is absent, f32 is used.\n"), [Rule::Opener]);
        assert_eq!(rules("a.md", "# What it has\n"), [Rule::Opener]);
    }

    #[test]
    fn plain_sentences_pass() {
        let text =
            "//! One kernel. `What` is code. What is code?\n//!\n//! Where f16 is absent, f32 is used.\n";
        assert_eq!(rules("a.rs", text), []);
        assert_eq!(rules("a.rs", "/// ```\n/// // What is code\n/// ```\nlet x = \"Those\";\n"), []);
        assert_eq!(rules("a.md", "| What | it |\n|---|---|\n\n# What is it?\n"), []);
    }

    #[test]
    fn exceptions_have_a_use() {
        let fault = || ("a.rs".to_string(), Fault { line: 1, rule: Rule::Word, text: "beside it".into() });
        let mut faults = vec![fault()];
        assert!(excepted(&mut faults, "a.rs\tbeside\ta quotation\n").unwrap().is_empty());
        assert!(faults.is_empty());
        let mut faults = vec![fault()];
        assert_eq!(excepted(&mut faults, "b.rs\tbeside\ta quotation\n").unwrap().len(), 1);
        assert_eq!(faults.len(), 1);
    }
}
