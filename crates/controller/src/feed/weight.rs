//! Estimates how much memory an object takes, and removes unused fields from it.

use kube::api::DynamicObject;
use serde_json::Value;

/// Bytes that a value takes in addition to its text: the overhead of the allocation and of the struct that points to it.
const VALUE_OVERHEAD: usize = 64;

/// Removes `managedFields`, and the fields at `paths` (such as `status/images`).
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

/// Estimates the bytes of memory that an object takes. The estimate is more likely too high than too low. Finalizers, owner references
/// and timestamps are not counted.
pub(super) fn estimate(object: &DynamicObject) -> usize {
    let metadata = &object.metadata;
    let texts = [
        &metadata.name,
        &metadata.namespace,
        &metadata.uid,
        &metadata.resource_version,
    ];
    let texts = texts.into_iter().flatten().map(|text| VALUE_OVERHEAD + text.len());
    let maps = [&metadata.labels, &metadata.annotations]
        .into_iter()
        .flatten()
        .flatten();
    let maps = maps.map(|(key, text)| 2 * VALUE_OVERHEAD + key.len() + text.len());
    texts.chain(maps).sum::<usize>() + estimate_value(&object.data)
}

fn estimate_value(value: &Value) -> usize {
    VALUE_OVERHEAD
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(values) => values.iter().map(estimate_value).sum(),
            Value::Object(fields) => fields
                .iter()
                .map(|(name, field)| VALUE_OVERHEAD + name.len() + estimate_value(field))
                .sum(),
        }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pruned_fields_do_not_count() {
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
        assert_eq!(estimate(&large), estimate(&object(json!({"phase": "Running"}))));
    }
}
