//! `scripts/terminal`: draws a picture of the output of a command.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, io};

use crate::error::{At, Result, ended, refused};
use crate::repo::Repo;

const USAGE: &str = "\
scripts/terminal OUT.svg COMMAND [ARGUMENTS...]: runs COMMAND at the repository's root and draws a terminal.
The picture shows the command and its output, standard output and standard error in the order in which they came. A
command that fails is not drawn.
";

/// Letters of a line; longer lines continue in the next one.
const COLUMNS: usize = 100;
/// The width of a letter, the height of a line, and the margin, in pixels.
const LETTER: f64 = 8.4;
const LINE: usize = 20;
const MARGIN: usize = 20;

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    let (out, command) = match &words[..] {
        [word] if word == "-h" || word == "--help" => {
            print!("{USAGE}");
            return Ok(());
        }
        [out, command @ ..]
            if !command.is_empty() && Path::new(out).extension() == Some(OsStr::new("svg")) =>
        {
            (Path::new(out), command)
        }
        _ => return Err(refused(USAGE.trim_end())),
    };
    let printed = run(repo, command)?;
    let shown: Vec<_> = command.iter().map(|word| quoted(&word.to_string_lossy())).collect();
    fs::write(out, svg(&shown.join(" "), &lines(&printed))).at(out)
}

/// Runs the command, shows its output here too, and returns it.
fn run(repo: &Repo, command: &[OsString]) -> Result<String> {
    let (mut reader, writer) = io::pipe()?;
    let mut child = {
        let mut child = Command::new(&command[0]);
        child.args(&command[1..]).current_dir(&repo.root).stdin(Stdio::null());
        // The writers are dropped at the end of this block: the reader waits for the last one.
        child.stdout(writer.try_clone()?).stderr(writer).spawn().at(&command[0])?
    };
    let (mut printed, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let n = reader.read(&mut part)?;
        if n == 0 {
            break;
        }
        printed.extend(&part[..n]);
        io::stderr().write_all(&part[..n])?;
    }
    let status = child.wait()?;
    if status.success() { Ok(String::from_utf8_lossy(&printed).into_owned()) } else { Err(ended(status)) }
}

/// Returns a word as a user would type it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    if word.contains(['"', '$', '`', '\\', '!']) {
        return format!("'{}'", word.replace('\'', r"'\''"));
    }
    format!("\"{word}\"")
}

/// Returns the lines that remain on a terminal, none longer than [`COLUMNS`]. It removes blank
/// lines at both ends.
fn lines(printed: &str) -> Vec<String> {
    let mut all = Vec::new();
    for line in without_codes(printed).lines() {
        // Overwritten text is gone.
        let last = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or("");
        all.extend(wrapped(last.replace('\t', "    ").trim_end()));
    }
    let blank = |line: &String| line.trim().is_empty();
    let end = all.iter().rposition(|line| !blank(line)).map_or(0, |last| last + 1);
    let start = all.iter().position(|line| !blank(line)).unwrap_or(end);
    all[start..end].to_vec()
}

/// Removes colours and movements of the cursor: ECMA-48, "control sequences".
fn without_codes(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text.chars().peekable());
    while let Some(c) = rest.next() {
        if c == '\x1b' && rest.next_if_eq(&'[').is_some() {
            while rest.next().is_some_and(|c| !('@'..='~').contains(&c)) {}
        } else if !c.is_control() || matches!(c, '\n' | '\r' | '\t') {
            plain.push(c);
        }
    }
    plain
}

/// Breaks a line between words, if possible.
fn wrapped(line: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut rest: Vec<char> = line.chars().collect();
    while rest.len() > COLUMNS {
        let space = rest[..=COLUMNS].iter().rposition(|c| *c == ' ').filter(|at| *at > 0);
        let later = rest.split_off(space.map_or(COLUMNS, |at| at + 1));
        parts.push(rest.iter().collect::<String>().trim_end().to_owned());
        rest = later;
    }
    parts.push(rest.into_iter().collect());
    parts
}

/// Draws light text on dark, on any page.
fn svg(command: &str, lines: &[String]) -> String {
    let prompt = wrapped(&format!("$ {command}"));
    let rows = prompt.len() + 1 + lines.len();
    let width = (COLUMNS as f64 * LETTER) as usize + 2 * MARGIN;
    let height = rows * LINE + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\" font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" \
         font-size=\"14\">\n<title>{}</title>\n<desc>Made by scripts/terminal of what the command printed.</desc>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#1f2430\"/>\n",
        escaped(command)
    );
    let blank = [String::new()];
    let dim = blank.iter().chain(lines).map(|line| ("#ccd2de", line));
    let shown = prompt.iter().map(|line| ("#ffffff", line)).chain(dim);
    for (row, (colour, line)) in shown.enumerate().filter(|(_, (_, line))| !line.trim().is_empty()) {
        let indent = line.chars().take_while(|c| *c == ' ').count();
        let text = line.trim();
        // The text has the same width in every font.
        let length = text.chars().count() as f64 * LETTER;
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" textLength=\"{length:.1}\" lengthAdjust=\"spacingAndGlyphs\" fill=\"{colour}\" \
             style=\"white-space: pre\">{}</text>",
            MARGIN as f64 + indent as f64 * LETTER,
            MARGIN + row * LINE + 15,
            escaped(text)
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_as_typed() {
        let words = ["cargo", "--release", "Why is it?", "it's", "a \"b\"", "$HOME", ""];
        let shown = ["cargo", "--release", "\"Why is it?\"", "\"it's\"", "'a \"b\"'", "'$HOME'", "\"\""];
        assert_eq!(words.map(quoted), shown);
    }

    #[test]
    fn control_codes_change_the_screen() {
        let printed = "\n\x1b[1;32mgreen\x1b[0m\n1 of 2\r2 of 2\r\n\ta  b\n\n\n";
        assert_eq!(lines(printed), ["green", "2 of 2", "    a  b"]);
        assert_eq!(lines("\n \n"), [""; 0]);
        let words = "word ".repeat(41);
        let parts = lines(&words);
        assert_eq!(parts.iter().map(|part| part.chars().count()).collect::<Vec<_>>(), [99, 99, 4]);
        assert_eq!(
            lines(&"é".repeat(201)).iter().map(|p| p.chars().count()).collect::<Vec<_>>(),
            [100, 100, 1]
        );
    }

    #[test]
    fn pictures_hold_what_was_printed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let repo = Repo::new(&folder).unwrap();
        let words =
            ["sh", "-c", "echo first; echo '<second> & third' >&2; echo; echo fourth"].map(OsString::from);
        let printed = run(&repo, &words).unwrap();
        assert_eq!(printed, "first\n<second> & third\n\nfourth\n");
        let picture = svg("sh", &lines(&printed));
        let texts: Vec<&str> = picture.lines().filter(|line| line.starts_with("<text")).collect();
        assert_eq!(texts.len(), 4);
        assert!(
            texts[0].ends_with(">$ sh</text>") && texts[2].ends_with(">&lt;second&gt; &amp; third</text>")
        );
        // The prompt, an empty line, and four lines; one of the four is blank.
        assert!(picture.contains("height=\"160\"") && texts[3].contains("y=\"135\""), "{picture}");
    }

    #[test]
    fn failing_commands_are_not_drawn() {
        let repo = Repo::new(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        let refused =
            |words: &[&str]| main(&repo, words.iter().map(OsString::from).collect()).unwrap_err().status;
        let out = std::env::temp_dir().join(format!("terminal-{}.svg", std::process::id()));
        let name = out.display().to_string();
        for words in [&[][..], &[name.as_str()], &["x.png", "true"]] {
            assert_eq!(refused(words), 2, "{words:?}");
        }
        assert_eq!(refused(&[&name, "sh", "-c", "exit 7"]), 7);
        assert_eq!(refused(&[&name, "no-such-program"]), 1);
        assert!(!out.exists());
    }
}
