//! What an object takes of memory, as far as rows are made of it, and how fields that nobody reads are left out first.

use kube::api::DynamicObject;
use serde_json::Value;

/// A value beside its text: what an allocation and its owner take.
const VALUE: usize = 64;

/// Leaves out these fields (`status/images`) and managedFields.
pub(super) fn prune(object: &mut DynamicObject, without: &[&str]) {
    object.metadata.managed_fields = None;
    for path in without {
        let mut fields = path.split('/');
        let Some(last) = fields.next_back() else { continue };
        let parent = fields.try_fold(&mut object.data, |value, field| value.get_mut(field));
        if let Some(parent) = parent.and_then(Value::as_object_mut) {
            parent.remove(last);
        }
    }
}

/// About what the row of an object takes, in bytes; rather more than less.
pub(super) fn of(object: &DynamicObject) -> usize {
    let metadata = &object.metadata;
    let texts = [
        &metadata.name,
        &metadata.namespace,
        &metadata.uid,
        &metadata.resource_version,
    ];
    let texts = texts.into_iter().flatten().map(|text| VALUE + text.len());
    let maps = [&metadata.labels, &metadata.annotations]
        .into_iter()
        .flatten()
        .flatten();
    let maps = maps.map(|(key, text)| 2 * VALUE + key.len() + text.len());
    texts.chain(maps).sum::<usize>() + value(&object.data)
}

fn value(of: &Value) -> usize {
    VALUE
        + match of {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(values) => values.iter().map(value).sum(),
            Value::Object(fields) => fields
                .iter()
                .map(|(name, field)| VALUE + name.len() + value(field))
                .sum(),
        }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pruned_fields_weigh_nothing_and_the_others_stay() {
        let object = |data: Value| -> DynamicObject {
            serde_json::from_value(
                json!({"metadata": {"name": "a"}, "status": data, "spec": {"podCIDR": "10.0.0.0/24"}}),
            )
            .unwrap()
        };
        let mut large = object(json!({"images": [{"names": ["x".repeat(1000)]}], "phase": "Running"}));
        prune(
            &mut large,
            &[
                "status/images",
                "status/nodeInfo",
                "absent/field",
                "spec/podCIDR/deeper",
            ],
        );
        assert_eq!(large, object(json!({"phase": "Running"})));
        assert_eq!(of(&large), of(&object(json!({"phase": "Running"}))));
    }
}
