//! Reads the table of Nodes: the columns that `kubectl get nodes -o wide` shows, without the objects.
//!
//! Source: <https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables>

use std::collections::BTreeMap;

use http::{Request, header::ACCEPT};
use kube::{Client, Error};
use serde::Deserialize;

/// The columns whose change makes a Node worth reading. Others change by themselves, such as the age.
const COLUMNS: [&str; 2] = ["Internal-IP", "External-IP"];

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    column_definitions: Vec<Column>,
    #[serde(default)]
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Column {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Row {
    cells: Vec<serde_json::Value>,
}

/// Returns the values of [`COLUMNS`], by Node. With resourceVersion 0 the API server answers from its memory, without a read of its database.
pub(super) async fn read(client: &Client) -> Result<BTreeMap<String, String>, Error> {
    let request = Request::get("/api/v1/nodes?includeObject=None&resourceVersion=0")
        .header(ACCEPT, "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .map_err(Error::HttpError)?;
    let table = client.request::<Table>(request).await?;
    Ok(rows(&table))
}

fn rows(table: &Table) -> BTreeMap<String, String> {
    let index_of = |wanted: &str| table.column_definitions.iter().position(|column| column.name == wanted);
    let Some(name) = index_of("Name") else {
        return BTreeMap::new();
    };
    let shown: Vec<usize> = COLUMNS.iter().filter_map(|column| index_of(column)).collect();
    let cell = |row: &Row, index: usize| {
        row.cells
            .get(index)
            .and_then(|cell| cell.as_str())
            .unwrap_or_default()
            .to_owned()
    };
    let rows = table.rows.iter();
    rows.map(|row| {
        let values: Vec<String> = shown.iter().map(|index| cell(row, *index)).collect();
        (cell(row, name), values.join(" "))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_have_names_and_addresses() {
        let table = json!({
            "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": "7"},
            "columnDefinitions": [
                {"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0},
                {"name": "Status", "type": "string", "format": "", "description": "", "priority": 0},
                {"name": "Internal-IP", "type": "string", "format": "", "description": "", "priority": 1},
                {"name": "External-IP", "type": "string", "format": "", "description": "", "priority": 1},
            ],
            "rows": [
                {"cells": ["a", "Ready", "192.0.2.1", "<none>"], "object": null},
                {"cells": ["b", "NotReady", "192.0.2.2", "198.51.100.2"], "object": null},
            ],
        });
        let want = [("a", "192.0.2.1 <none>"), ("b", "192.0.2.2 198.51.100.2")];
        let want = want.map(|(name, row)| (name.to_owned(), row.to_owned()));
        assert_eq!(rows(&serde_json::from_value(table).unwrap()), want.into());
    }
}
