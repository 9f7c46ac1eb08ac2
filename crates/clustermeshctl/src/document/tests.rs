use std::collections::BTreeMap;

use super::{read::Misfit, *};

#[derive(Debug, PartialEq, Deserialize)]
struct Shape {
    name: String,
    #[serde(default)]
    ports: Vec<u16>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    note: Option<String>,
}

fn misfit(text: &str) -> Misfit {
    let documents = parse("f", text).unwrap();
    read::<Shape>(&documents[0].tree).unwrap_err()
}

#[test]
fn a_value_of_the_wrong_type_is_told_with_its_field_and_line() {
    assert_eq!(
        misfit("name: a\nports:\n- 1\n- x\n"),
        Misfit {
            field: "ports[1]".into(),
            line: 4,
            message: "invalid type: string \"x\", expected u16".into()
        }
    );
    assert_eq!(
        misfit("name: a\nlabels:\n  k: v\n  n: 7\n"),
        Misfit {
            field: "labels.n".into(),
            line: 4,
            message: "invalid type: integer `7`, expected a string".into()
        }
    );
}

#[test]
fn a_missing_field_is_told_at_the_object_that_lacks_it() {
    let second = &parse("f", "name: a\n---\nports: []\n").unwrap()[1];
    assert_eq!(
        read::<Shape>(&second.tree).unwrap_err(),
        Misfit {
            field: String::new(),
            line: 3,
            message: "missing field `name`".into()
        }
    );
}

#[test]
fn fields_that_a_type_does_not_have_are_told() {
    let document = &parse("f", "name: a\nnote: null\nport: [1]\nlabels: {}\n").unwrap()[0];
    let shape = Shape {
        name: "a".into(),
        ports: vec![],
        labels: BTreeMap::new(),
        note: None,
    };
    assert_eq!(
        read::<Shape>(&document.tree).unwrap(),
        (shape, vec![("port".to_owned(), 3)])
    );
}

#[test]
fn json_is_read_with_its_lines_whatever_it_is_indented_with() {
    let text = "{\n\t\"name\": \"a\\/\\u00e9\\u003c\",\n\t\"ports\": [\n\t\t\"x\"\n\t]\n}\n";
    let documents = parse("f", text).unwrap();
    assert_eq!(documents[0].tree.text("name"), Some("a/é<"));
    assert_eq!(documents[0].tree.line_of("ports[0]"), 4);
}

#[test]
fn a_line_is_found_as_deep_as_the_document_goes() {
    let tree = &parse("f", "spec:\n  clusters:\n  - name: a\n  - name: b\n    x: y\n").unwrap()[0].tree;
    let lines = [
        "spec.clusters[1].x",
        "spec.clusters[1].nets[3]",
        "spec.clusters[7]",
        "status",
    ]
    .map(|f| tree.line_of(f));
    assert_eq!(lines, [5, 4, 3, 1]);
}

#[test]
fn what_is_not_yaml_is_told_with_its_line() {
    let problem = parse("dir/f.yaml", "a: 1\nb: [1\nc: }\n").unwrap_err();
    assert_eq!(problem.place.as_ref().unwrap().file, "dir/f.yaml");
    assert!(problem.place.unwrap().line >= 2);
}

#[test]
fn a_key_that_is_there_twice_is_refused() {
    let problem = parse("f", "a: 1\na: 2\n").unwrap_err();
    assert_eq!(problem.place.unwrap().line, 2, "{}", problem.message);
}
