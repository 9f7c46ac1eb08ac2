//! Parses every command line of our programs in the documents with the program's argument parser, and checks that every flag in the
//! text exists.

use clap::{Command, CommandFactory, error::ErrorKind};

use super::{pages, shell};

/// The words with which a command line begins, and the program that parses the rest.
fn programs() -> [(&'static [&'static str], Command); 5] {
    [
        (&["cargo", "xtask"], crate::Cli::command()),
        (
            &["clustermesh-controller"],
            clustermesh_controller::args::Args::command(),
        ),
        (&["clustermeshctl"], clustermeshctl::command()),
        (&["wg-agent"], wg_agent::args::Cli::command()),
        (&["/wg-agent"], wg_agent::args::Cli::command()),
    ]
}

/// Placeholders in documents, and a value that the parser accepts instead.
const PLACEHOLDERS: &[(&str, &str)] = &[("N", "1")];

/// Flags in the text that belong to other programs.
const FOREIGN_FLAGS: &[(&str, &str)] = &[
    ("--device", "podman"),
    ("--force", "kubectl"),
    ("--mesh-granularity", "kg"),
    ("--subnet", "kg"),
    ("--upstream", "kube-rbac-proxy"),
];

/// The parser's error for a command line of one of our programs; `None` = the line is accepted, or is of another program.
/// `is_mention` = the command is mentioned in a sentence, so arguments may be missing.
fn fault(words: &[String], is_mention: bool) -> Option<String> {
    let (prefix, program) = programs().into_iter().find(|(prefix, _)| {
        words.len() >= prefix.len() && prefix.iter().zip(words).all(|(prefix, word)| prefix == word)
    })?;
    let value = |word: &String| {
        let placeholder = PLACEHOLDERS.iter().find(|(placeholder, _)| placeholder == word);
        placeholder.map_or_else(|| word.clone(), |(_, value)| (*value).to_owned())
    };
    let line = words[prefix.len() - 1..].iter().map(value);
    let error = program.try_get_matches_from(line).err()?;
    let is_incomplete = matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let is_accepted = is_help || is_mention && is_incomplete;
    (!is_accepted).then(|| format!("{}: {error}", words.join(" ")))
}

/// The command itself, and the command that it runs after `--`, such as with `kubectl exec`.
fn command_lines(words: &[String]) -> Vec<&[String]> {
    let inner = words.iter().position(|word| word == "--").map(|at| &words[at + 1..]);
    std::iter::once(words).chain(inner).collect()
}

#[test]
fn command_lines_in_the_documents_are_accepted() {
    let mut faults = String::new();
    let mut checked = 0;
    let mut check = |position: &str, words: &[String], is_mention: bool| {
        for line in command_lines(words) {
            checked += 1;
            if let Some(fault) = fault(line, is_mention) {
                faults += &format!("\n{position}: {fault}");
            }
        }
    };
    for page in pages() {
        for block in &page.blocks {
            shell::commands(block)
                .iter()
                .for_each(|words| check(&block.position, words, false));
        }
        for (position, span) in &page.spans {
            shell::split(span).iter().for_each(|words| check(position, words, true));
        }
    }
    assert!(checked > 100, "only {checked} command lines were found");
    assert!(faults.is_empty(), "command lines that the programs refuse:{faults}");
}

/// All long flags of a command and its subcommands.
fn flags(command: &Command, found: &mut Vec<String>) {
    found.extend(
        command
            .get_arguments()
            .filter_map(|argument| argument.get_long())
            .map(|long| format!("--{long}")),
    );
    command.get_subcommands().for_each(|command| flags(command, found));
}

#[test]
fn flags_named_in_the_text_exist() {
    let mut known: Vec<String> = FOREIGN_FLAGS.iter().map(|(flag, _)| (*flag).to_owned()).collect();
    programs().iter().for_each(|(_, program)| flags(program, &mut known));
    let mut faults = String::new();
    for (position, span) in pages().into_iter().flat_map(|page| page.spans) {
        let flag = span.split([' ', '=', ',']).next().unwrap_or_default();
        if flag.starts_with("--") && !known.iter().any(|known| known == flag) {
            faults += &format!("\n{position}: {flag}");
        }
    }
    assert!(
        faults.is_empty(),
        "no program of ours has these flags; add flags of other programs to FOREIGN_FLAGS:{faults}"
    );
}

#[test]
fn wrong_flags_and_missing_arguments_are_reported() {
    let fault = |line: &str, is_mention| {
        fault(&shell::split(line)[0], is_mention).map(|fault| fault.lines().next().unwrap().to_owned())
    };
    for fine in [
        "clustermeshctl plan -f mesh.yaml",
        "cargo xtask fuzz TARGET --seconds N",
        "wg-agent --help",
        "kubectl get nodes",
        "cargo build",
    ] {
        assert_eq!(fault(fine, false), None, "{fine}");
    }
    assert_eq!(fault("clustermeshctl explain", true), None);
    assert!(fault("clustermeshctl explain", false).is_some());
    for is_mention in [false, true] {
        assert_eq!(
            fault("wg-agent --keyfile=x", is_mention).as_deref(),
            Some("wg-agent --keyfile=x: error: unexpected argument '--keyfile' found")
        );
    }
}
