//! Estimates how much memory an object takes, and removes unused fields from it.

use kube::api::DynamicObject;
use serde_json::Value;

/// Bytes that a value takes in addition to its text: the allocation and its owner.
const VALUE: usize = 64;

/// Removes `managedFields` and these fields (paths such as `status/images`).
pub(super) fn prune(object: &mut DynamicObject, paths: &[&str]) {
    object.metadata.managed_fields = None;
    for path in paths {
        let mut fields = path.split('/');
        let Some(last) = fields.next_back() else { continue };
        let parent = fields.try_fold(&mut object.data, |value, field| value.get_mut(field));
        if let Some(parent) = parent.and_then(Value::as_object_mut) {
            parent.remove(last);
        }
    }
}

/// Estimates the bytes that the row of an object takes; the estimate is rather too high than too low.
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
    fn pruned_fields_weigh_nothing() {
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
