//! Checks the links in every Markdown file of the repository: the files exist, and the anchors are those that GitHub generates from
//! headings, or ids in HTML. Links to the web are not checked. A link from the name of a function to a Rust file is valid only if the
//! function is in this file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Component, Path, PathBuf},
};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// A Markdown file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    anchors: BTreeSet<String>,
    links: Vec<Link>,
}

#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    target: String,
    /// The text of the link, if it is code.
    code: Option<String>,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut anchor_uses = BTreeMap::new();
        let mut heading: Option<String> = None;
        let mut is_in_link = false;
        let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_STRIKETHROUGH;
        for (event, Range { start, .. }) in Parser::new_ext(text, options).into_offset_iter() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = anchor(&heading.take().unwrap_or_default());
                    // GitHub appends a number to the anchor of a repeated heading.
                    let uses: &mut usize = anchor_uses.entry(anchor.clone()).or_default();
                    page.anchors.insert(match uses {
                        0 => anchor,
                        _ => format!("{anchor}-{uses}"),
                    });
                    *uses += 1;
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(Link {
                        line: text[..start].matches('\n').count() + 1,
                        target: dest_url.into_string(),
                        code: None,
                    });
                    is_in_link = true;
                }
                Event::End(TagEnd::Link | TagEnd::Image) => is_in_link = false,
                Event::Text(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                    if let Some(link) = page.links.last_mut().filter(|_| is_in_link) {
                        link.code = Some(text.into_string());
                    }
                }
                Event::Html(html) | Event::InlineHtml(html) => {
                    let ids = html.split("id=\"").skip(1).filter_map(|rest| rest.split('"').next());
                    page.anchors.extend(ids.map(str::to_owned));
                }
                _ => {}
            }
        }
        page
    }
}

/// The anchor that GitHub generates for a heading: lower case, without punctuation except `-` and `_`, and with a hyphen for each
/// space (`TableOfContentsFilter` in github.com/gjtorikian/html-pipeline).
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept
        .chars()
        .filter(|c| c.is_alphanumeric() || ['_', '-', ' '].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The fault of a link in the page `from`; `None` = the link is valid, or leads to the web. `from` and the keys of
/// `pages` are relative to the root of the repository, `link` to the folder of `from`.
fn fault(pages: &BTreeMap<PathBuf, Page>, from: &Path, link: &str, exists: impl Fn(&Path) -> bool) -> Option<String> {
    if link.starts_with("https:") || link.starts_with("http:") || link.starts_with("mailto:") {
        return None;
    }
    let (path, fragment) = match link.split_once('#') {
        Some((path, fragment)) => (path, Some(fragment)),
        None => (link, None),
    };
    let target = if path.is_empty() {
        from.to_owned()
    } else if let Some(target) = normalized(&from.with_file_name("").join(path)) {
        target
    } else {
        return Some("points outside the repository".to_owned());
    };
    if !exists(&target) {
        return Some(format!("there is no {}", target.display()));
    }
    let fragment = fragment?;
    match pages.get(&target) {
        Some(page) if !page.anchors.contains(fragment) => {
            Some(format!("{} has no heading for #{fragment}", target.display()))
        }
        Some(_) => None,
        None => Some(format!(
            "{} is not a Markdown file, so it has no anchors",
            target.display()
        )),
    }
}

/// The function that a link names, and the Rust file that should contain it, as written in the link.
fn named_function(link: &Link) -> Option<(&str, &str)> {
    let code = link.code.as_deref()?;
    let is_name = |code: &str| {
        code.chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    // A name without `_` may also be that of a crate or module.
    (link.target.ends_with(".rs") && is_name(code) && code.contains('_')).then_some((code, &*link.target))
}

fn has_function(source: &str, name: &str) -> bool {
    let signatures = [format!("fn {name}("), format!("fn {name}<")];
    signatures.iter().any(|signature| source.contains(signature))
}

/// The path without `.` and `..`; `None` if it is absolute or outside the root.
fn normalized(path: &Path) -> Option<PathBuf> {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if normalized.pop() => {}
            Component::Normal(name) => normalized.push(name),
            _ => return None,
        }
    }
    Some(normalized)
}

/// Finds every Markdown file below a folder, except in build output and hidden folders.
fn markdown_files(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                markdown_files(&path, found);
            }
        } else if name.ends_with(".md") {
            found.insert(path);
        }
    }
}

#[test]
fn links_of_all_markdown_files_have_targets() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = BTreeSet::new();
    markdown_files(&root, &mut files);
    let pages = files.iter().map(|path| {
        let name = path.strip_prefix(&root).unwrap().to_owned();
        (name, Page::read(&fs::read_to_string(path).unwrap()))
    });
    let pages: BTreeMap<PathBuf, Page> = pages.collect();
    assert!(pages.contains_key(Path::new("README.md")), "{:?}", pages.keys());
    let mut faults = String::new();
    for (from, page) in &pages {
        for link in &page.links {
            let missing_function = named_function(link).and_then(|(function, file)| {
                let source = fs::read_to_string(root.join(from).with_file_name("").join(file)).unwrap_or_default();
                (!has_function(&source, function)).then(|| format!("it has no function {function}"))
            });
            let fault = fault(&pages, from, &link.target, |path| root.join(path).exists()).or(missing_function);
            if let Some(fault) = fault {
                faults += &format!("\n{}:{}: {}: {fault}", from.display(), link.line, link.target);
            }
        }
    }
    assert!(faults.is_empty(), "links without a target:{faults}");
}

#[test]
fn anchors_follow_githubs_rule() {
    let headings = [
        ("The underlay of a sandbox", "the-underlay-of-a-sandbox"),
        ("`--mode=policy`: next to kg, \"what\"?", "--modepolicy-next-to-kg-what"),
        ("A - b_c & d", "a---b_c--d"),
        ("Größe 2", "größe-2"),
    ];
    for (heading, want) in headings {
        assert_eq!(anchor(heading), want);
    }
}

#[test]
fn page_has_its_anchors_and_links() {
    let text = "# One `two`\n\n## Twice\n\n## Twice\n<a id=\"own\"></a>\n\n| a |\n|---|\n| [x](y.md#z) |\n\n\
                `[no](link.md)`\n\n```\n# no heading\n[no](link.md)\n```\n![image](i.svg) [ref]\n\n[ref]: r.md\n";
    let page = Page::read(text);
    let anchors: Vec<&str> = page.anchors.iter().map(String::as_str).collect();
    assert_eq!(anchors, ["one-two", "own", "twice", "twice-1"]);
    let links: Vec<(usize, &str)> = page.links.iter().map(|link| (link.line, &*link.target)).collect();
    assert_eq!(links, [(10, "y.md#z"), (18, "i.svg"), (18, "r.md")]);
}

#[test]
fn broken_links_are_reported() {
    let pages = [
        (PathBuf::from("README.md"), Page::read("# Start")),
        (PathBuf::from("docs/a.md"), Page::read("# A\n## B c")),
    ];
    let pages = BTreeMap::from(pages);
    let exists = |path: &Path| pages.contains_key(path) || path == Path::new("docs") || path == Path::new("Cargo.toml");
    let fault = |link| fault(&pages, Path::new("docs/a.md"), link, exists);
    for link in [
        "https://example.com/x#y",
        "#b-c",
        "a.md#a",
        "../README.md#start",
        "./a.md",
        "../docs/",
        "../Cargo.toml",
    ] {
        assert_eq!(fault(link), None, "{link}");
    }
    let faults = [
        ("b.md", "there is no docs/b.md"),
        ("#b", "docs/a.md has no heading for #b"),
        ("../README.md#end", "README.md has no heading for #end"),
        (
            "../Cargo.toml#x",
            "Cargo.toml is not a Markdown file, so it has no anchors",
        ),
        ("../../x.md", "points outside the repository"),
        ("/README.md", "points outside the repository"),
    ];
    for (link, want) in faults {
        assert_eq!(fault(link).as_deref(), Some(want), "{link}");
    }
}

#[test]
fn link_from_a_function_name_needs_the_function() {
    let named = |text: &str| {
        let page = Page::read(text);
        named_function(&page.links[0]).map(|(function, file)| (function.to_owned(), file.to_owned()))
    };
    assert_eq!(
        named("[`a_b2`](../x.rs) `c`"),
        Some(("a_b2".to_owned(), "../x.rs".to_owned()))
    );
    assert_eq!(named("`c` [text](x.rs) `c`"), None);
    assert_eq!(named("[`x.rs`](x.rs)"), None);
    assert_eq!(named("[`a_b2`](x.md)"), None);
    let source = "async fn a_b2(x: u8) {}\nfn generic<T>() {}\n// b2";
    let found = ["a_b2", "generic", "b2", "a_b"].map(|name| has_function(source, name));
    assert_eq!(found, [true, true, false, false]);
}

/// docs/predecessor.md: 28 defects of correctness and 11 of trust.
#[test]
fn every_defect_of_the_predecessor_names_a_test() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/predecessor.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text.lines().filter_map(|line| {
        let (id, row) = line.strip_prefix("| ")?.split_once(" | ")?;
        let names_a_test = Page::read(row).links.iter().any(|link| named_function(link).is_some());
        names_a_test.then(|| id.to_owned())
    });
    let want = (1..=28)
        .map(|n| format!("W{n}"))
        .chain((1..=11).map(|n| format!("T{n}")));
    assert_eq!(rows.collect::<Vec<_>>(), want.collect::<Vec<_>>());
}
