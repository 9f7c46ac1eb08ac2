//! Checks that every test that THREATS.md names is one that runs, and every step one that its test runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// What the sources define, by name.
#[derive(Debug, Default)]
struct Sources {
    /// Files, without the folder and `.rs`.
    files: BTreeSet<String>,
    /// Functions that the test harness calls.
    tests: BTreeSet<String>,
    /// The functions that each function names.
    calls: BTreeMap<String, BTreeSet<String>>,
    /// String literals: names of metrics, of their labels.
    literals: BTreeSet<String>,
    /// Macros that write `#[test]` before what they are given.
    test_macros: BTreeSet<String>,
}

impl Sources {
    fn read(files: &[(String, String)]) -> Self {
        let mut sources = Self::default();
        let parsed: Vec<TokenStream> = files.iter().map(|(_, text)| text.parse().unwrap()).collect();
        for ((name, _), tokens) in files.iter().zip(&parsed) {
            sources.files.insert(name.clone());
            sources.find_macros(tokens);
        }
        parsed.iter().for_each(|tokens| sources.find_functions(tokens));
        sources
    }

    /// `macro_rules! both { (..) => { #[test] fn $name() {..} } }`, in any folder: tests share their macros' names.
    fn find_macros(&mut self, tokens: &TokenStream) {
        let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
        for window in tokens.windows(4) {
            if let [rules, _, TokenTree::Ident(name), TokenTree::Group(body)] = window
                && is_ident(rules, "macro_rules")
                && body.to_string().replace(' ', "").contains("#[test]fn$")
            {
                self.test_macros.insert(name.to_string());
            }
        }
    }

    /// Also inside modules and macros (`proptest! {..}`).
    fn find_functions(&mut self, tokens: &TokenStream) {
        let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
        let mut is_test = false;
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) if at > 0 && is_punct(&tokens[at - 1], '#') => {
                    is_test |= is_test_attribute(group)
                }
                TokenTree::Group(group) => {
                    self.find_functions(&group.stream());
                    if group.delimiter() == Delimiter::Brace {
                        is_test = false;
                    }
                }
                TokenTree::Ident(word) if word == "fn" => {
                    let Some(TokenTree::Ident(name)) = tokens.get(at + 1) else {
                        continue;
                    };
                    if is_test {
                        self.tests.insert(name.to_string());
                    }
                    let body = tokens[at + 2..].iter().find_map(body);
                    let called = body.map(|body| called(&body.stream())).unwrap_or_default();
                    self.calls.entry(name.to_string()).or_default().extend(called);
                }
                TokenTree::Ident(name) if self.test_macros.contains(&name.to_string()) => {
                    if let [TokenTree::Punct(_), TokenTree::Group(cases), ..] = &tokens[at + 1..] {
                        let cases = cases.stream().into_iter();
                        self.tests.extend(cases.filter_map(|case| match case {
                            TokenTree::Ident(case) => Some(case.to_string()),
                            _ => None,
                        }));
                    }
                }
                TokenTree::Literal(literal) => {
                    self.literals.insert(literal.to_string().trim_matches('"').to_owned());
                }
                _ => {}
            }
        }
    }

    /// Whether the test calls the step, itself or through other functions whose names are sentences: shorter ones are not unique.
    fn runs(&self, test: &str, step: &str) -> bool {
        let (mut seen, mut next) = (BTreeSet::new(), vec![test]);
        while let Some(name) = next.pop() {
            let called = self.calls.get(name).into_iter().flatten();
            for name in called.filter(|name| name.matches('_').count() > 2) {
                if name == step {
                    return true;
                }
                if seen.insert(name) {
                    next.push(name);
                }
            }
        }
        false
    }

    fn fault(&self, Named { name, test }: &Named<'_>) -> Option<String> {
        let fault = match test {
            Some(test) if !self.tests.contains(*test) => format!("`{test}` is no test"),
            Some(test) if !self.runs(test, name) => format!("`{test}` calls no `{name}`"),
            Some(_) => return None,
            None if self.tests.contains(*name) || self.files.contains(*name) || self.literals.contains(*name) => {
                return None;
            }
            None if self.calls.contains_key(*name) => {
                format!("`{name}` is no test; a step of one is named with it: `{name}` (step of `TEST`)")
            }
            None => format!("`{name}` is nowhere"),
        };
        Some(fault)
    }
}

fn is_ident(token: &TokenTree, text: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == text)
}

fn is_punct(token: &TokenTree, text: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == text)
}

/// `#[test]`, `#[tokio::test]`, `#[tokio::test(..)]`.
fn is_test_attribute(group: &Group) -> bool {
    let text = group.stream().to_string().replace(' ', "");
    ["test", "tokio::test"].contains(&text.split('(').next().unwrap_or_default())
}

/// The body of a function, where its head goes on with this token.
fn body(token: &TokenTree) -> Option<&Group> {
    match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group),
        _ => None,
    }
}

/// Every name before a parenthesis.
fn called(tokens: &TokenStream) -> BTreeSet<String> {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut names = BTreeSet::new();
    for (at, token) in tokens.iter().enumerate() {
        if let TokenTree::Group(group) = token {
            names.extend(called(&group.stream()));
            if let Some(TokenTree::Ident(name)) = at.checked_sub(1).map(|before| &tokens[before])
                && group.delimiter() == Delimiter::Parenthesis
            {
                names.insert(name.to_string());
            }
        }
    }
    names
}

/// A name in THREATS.md: of a test, of a file of tests, of a metric, or of a step with its test.
#[derive(Debug, PartialEq, Eq)]
struct Named<'t> {
    name: &'t str,
    test: Option<&'t str>,
}

/// Between the name of a step and that of its test, backquotes left out.
const STEP: &str = " (step of ";

/// The words of a text that stand between backquotes and are made of what names are made of; of a step, with its test.
fn named(text: &str) -> Vec<Named<'_>> {
    let is_name = |word: &&str| {
        word.contains('_')
            && word
                .bytes()
                .all(|c| c == b'_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    let mut all = Vec::new();
    // A line at a time: an odd backquote costs that line.
    for line in text.lines() {
        let parts: Vec<&str> = line.split('`').collect();
        for at in (1..parts.len()).step_by(2) {
            if !is_name(&parts[at]) || parts[at - 1] == STEP {
                continue;
            }
            let test = (parts.get(at + 1) == Some(&STEP)).then(|| parts[at + 2]);
            all.push(Named { name: parts[at], test });
        }
    }
    all
}

/// Every Rust file below a folder, with its name.
fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for path in paths.collect::<BTreeSet<PathBuf>>() {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            found.push((name, fs::read_to_string(path).unwrap()));
        }
    }
}

#[test]
fn every_test_that_threats_md_names_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for folder in ["crates", "tests"] {
        sources(&root.join(folder), &mut files);
    }
    // Its own examples prove nothing.
    files.retain(|(name, _)| name != "threats");
    let sources = Sources::read(&files);
    let threats = fs::read_to_string(root.join("THREATS.md")).unwrap();
    let named = named(&threats);
    assert!(named.len() > 150, "only {} names were found in THREATS.md", named.len());
    let faults: Vec<String> = named.iter().filter_map(|name| sources.fault(name)).collect();
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn names_that_no_test_run_reaches_are_found() {
    let code = r#"
        macro_rules! both { ($($name:ident)*) => { mod v4 { $(#[test] fn $name() { super::$name(4) })* } } }
        macro_rules! other { ($($name:ident)*) => { $(fn $name() {})* } }
        both! { of_a_macro }
        other! { of_no_test_macro }
        fn of_a_macro(n: u8) { if n > 3 { a_step_of_the_macro(n, &[0; { 1 }]) } }
        fn of_no_test_macro() {}
        // #[test] fn in_a_comment() {}
        const TEXT: &str = "drops_total";
        proptest! { #![proptest_config(x())] #[test] fn of_proptest(a in any::<u8>()) { called(a) } }
        mod inner { #[cfg(test)] #[tokio::test(flavor = "multi_thread")] async fn plain_test() { super::a_step_that_runs().await; } }
        pub(crate) async fn a_step_that_runs() { a_step_below_that() }
        fn a_step_below_that() {}
        fn a_step_never_called() {}
        #[cfg(test)] fn no_test() {}
    "#;
    let sources = Sources::read(&[("mesh_flows".to_owned(), code.to_owned())]);
    let text = "`of_a_macro` `of_proptest`, `plain_test`; `mesh_flows` `drops_total` `wg_agent_total{x}` `fwmark`\n\
                `a_step_that_runs` (step of `plain_test`) `a_step_below_that` (step of `plain_test`)\n\
                `a_step_of_the_macro` (step of `of_a_macro`) ` `odd_quote`\n\
                `of_no_test_macro` `no_test` `in_a_comment` `gone_away`\n\
                `a_step_never_called` (step of `plain_test`) `a_step_that_runs` (step of `of_proptest`)\n\
                `a_step_below_that` (step of `a_step_that_runs`)";
    let faults: Vec<String> = named(text).iter().filter_map(|name| sources.fault(name)).collect();
    let step = |name| format!("`{name}` is no test; a step of one is named with it: `{name}` (step of `TEST`)");
    assert_eq!(
        faults,
        [
            step("of_no_test_macro"),
            step("no_test"),
            "`in_a_comment` is nowhere".to_owned(),
            "`gone_away` is nowhere".to_owned(),
            "`plain_test` calls no `a_step_never_called`".to_owned(),
            "`of_proptest` calls no `a_step_that_runs`".to_owned(),
            "`a_step_that_runs` is no test".to_owned(),
        ]
    );
}
