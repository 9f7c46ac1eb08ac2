use std::collections::BTreeMap;

use super::{read::FieldError, *};

#[derive(Debug, PartialEq, Deserialize)]
struct Shape {
    name: String,
    #[serde(default)]
    ports: Vec<u16>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    note: Option<String>,
}

fn read_error(text: &str) -> FieldError {
    let documents = parse("f", text).unwrap();
    read::<Shape>(&documents[0].tree).unwrap_err()
}

#[test]
fn wrong_type_is_reported_with_field_and_line() {
    assert_eq!(
        read_error("name: a\nports:\n- 1\n- x\n"),
        FieldError {
            field: "ports[1]".into(),
            line: 4,
            message: "invalid type: string \"x\", expected u16".into()
        }
    );
    assert_eq!(
        read_error("name: a\nlabels:\n  k: v\n  n: 7\n"),
        FieldError {
            field: "labels.n".into(),
            line: 4,
            message: "invalid type: integer `7`, expected a string".into()
        }
    );
    let dotted = read_error("name: a\nlabels:\n  k: v\n  example.com/n: 7\n");
    assert_eq!((&*dotted.field, dotted.line), ("labels.example.com/n", 4));
}

#[test]
fn error_about_missing_field_has_the_line_of_its_object() {
    let second = &parse("f", "name: a\n---\nports: []\n").unwrap()[1];
    assert_eq!(
        read::<Shape>(&second.tree).unwrap_err(),
        FieldError {
            field: String::new(),
            line: 3,
            message: "missing field `name`".into()
        }
    );
}

#[test]
fn unknown_fields_are_reported() {
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
fn json_with_tabs_keeps_line_numbers() {
    let text = "{\n\t\"name\": \"a\\/\\u00e9\\u003c\",\n\t\"ports\": [\n\t\t\"x\"\n\t]\n}\n";
    let documents = parse("f", text).unwrap();
    let value = serde_json::Value::from(&documents[0].tree);
    assert_eq!(value["name"], "a/é<");
    assert_eq!(documents[0].tree.line_of("ports[0]"), 4);
}

#[test]
fn missing_field_has_the_line_of_its_innermost_parent() {
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
fn invalid_yaml_is_reported_with_file_and_line() {
    let problem = parse("dir/f.yaml", "a: 1\nb: [1\nc: }\n").unwrap_err();
    assert_eq!(problem.position.as_ref().unwrap().file, "dir/f.yaml");
    assert!(problem.position.unwrap().line >= 2);
}

#[test]
fn duplicate_key_is_refused() {
    let problem = parse("f", "a: 1\na: 2\n").unwrap_err();
    assert_eq!(problem.position.unwrap().line, 2, "{}", problem.message);
}
