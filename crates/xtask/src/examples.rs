//! Checks the examples in the documents (README.md, CONTRIBUTING.md, docs/operations). The programs' argument parsers must accept
//! every command line, and every manifest must deserialize into its API type. So a test fails if a flag or field is
//! renamed and an example still has the old name.

use std::{collections::BTreeSet, fs, path::PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use xtask::programs::root;

mod commands;
mod kubectl;
mod manifests;
mod shell;

/// A fenced code block.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    language: String,
    text: String,
    /// File, and number of the first line after the fence: `docs/operations/nat.md:12`.
    position: String,
}

/// The examples of a document.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    blocks: Vec<Block>,
    /// Position and text of inline code.
    spans: Vec<(String, String)>,
}

impl Page {
    fn read(name: &str, text: &str) -> Self {
        let mut page = Self::default();
        let mut block: Option<Block> = None;
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let line = text[..range.start].matches('\n').count() + 1;
            match event {
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    block = Some(Block {
                        language: language.into_string(),
                        text: String::new(),
                        position: format!("{name}:{}", line + 1),
                    });
                }
                Event::End(TagEnd::CodeBlock) => page.blocks.extend(block.take()),
                Event::Text(text) => {
                    if let Some(block) = &mut block {
                        block.text.push_str(&text);
                    }
                }
                Event::Code(code) => page.spans.push((format!("{name}:{line}"), code.into_string())),
                _ => {}
            }
        }
        page
    }
}

/// Reads README.md, CONTRIBUTING.md and the pages of docs/operations.
fn pages() -> Vec<Page> {
    let mut names: BTreeSet<PathBuf> = ["README.md", "CONTRIBUTING.md"].map(PathBuf::from).into();
    for entry in fs::read_dir(root().join("docs/operations")).unwrap() {
        names.insert(PathBuf::from("docs/operations").join(entry.unwrap().file_name()));
    }
    let read = |name: &PathBuf| {
        let text = fs::read_to_string(root().join(name)).unwrap();
        Page::read(&name.display().to_string(), &text)
    };
    names.iter().map(read).collect()
}

#[test]
fn page_has_its_blocks_and_spans() {
    let text = "# `one`\n\n```sh\na b\nc\n```\n\n| x |\n|---|\n| `two` |\n\n```console\n$ d\n```\n";
    let block = |language: &str, text: &str, position: &str| Block {
        language: language.into(),
        text: text.into(),
        position: position.into(),
    };
    assert_eq!(
        Page::read("p.md", text),
        Page {
            blocks: vec![block("sh", "a b\nc\n", "p.md:4"), block("console", "$ d\n", "p.md:13")],
            spans: vec![("p.md:1".into(), "one".into()), ("p.md:10".into(), "two".into())],
        }
    );
}
