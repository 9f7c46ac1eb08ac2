//! Writes the objects that otherwise the controller, Kubernetes and users write, and reads the gateway's status.

use clustermesh_lab::wait_until;
use clustermesh_tests::traffic::{MUTE_PORT, TCP_PORT, UDP_PORT};
use kube::{
    Api,
    api::{DynamicObject, GroupVersionKind, Patch, PatchParams},
    discovery::ApiResource,
};
use serde_json::{Value, json};

use super::{CLOSED_PORT, NAME, NAMESPACE, TIMEOUT, Testbed};

impl Testbed {
    fn api(&self, kind: &str, plural: &str, namespace: Option<&str>) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        }
    }

    /// Writes a SandboxAccess, as the controller does, and returns its generation.
    pub(crate) async fn write_access(&self, name: &str, spec: Value) -> i64 {
        let object = json!({"apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": name}, "spec": spec});
        let params = PatchParams::apply("test").force();
        let objects = self.api("SandboxAccess", "sandboxaccesses", None);
        let written = objects
            .patch(name, &params, &Patch::Apply(&object))
            .await
            .expect("write a SandboxAccess");
        written.metadata.generation.unwrap_or_default()
    }

    /// Writes a SandboxAccess and waits until the gateway's status lists the written generation as applied.
    pub(crate) async fn apply_access(&self, name: &str, spec: Value) {
        let generation = self.write_access(name, spec).await;
        self.wait_for_status(&format!("{name} to be in force"), |status| {
            let applied = status["applied"].as_array().into_iter().flatten();
            applied
                .clone()
                .any(|access| access["name"] == name && access["generation"] == generation)
        })
        .await;
    }

    pub(crate) async fn status(&self) -> Value {
        let objects = self.api("SandboxGateway", "sandboxgateways", Some(NAMESPACE));
        let object = objects.get(NAME).await.expect("the SandboxGateway");
        object.data["status"].clone()
    }

    /// Waits until the gateway's status fulfils `condition`.
    pub(crate) async fn wait_for_status(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        wait_until(what.to_owned(), TIMEOUT, async || {
            last = self.status().await;
            if condition(&last) {
                Ok(())
            } else {
                Err(last.to_string())
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        last
    }

    pub(crate) async fn write_service(&self, name: &str, extra_fields: Value) {
        let mut spec = json!({"ports": [
            {"name": "sql", "port": 5432, "targetPort": TCP_PORT, "protocol": "TCP"},
            {"name": "log", "port": 514, "targetPort": UDP_PORT, "protocol": "UDP"},
            {"name": "mute", "port": 515, "targetPort": MUTE_PORT, "protocol": "UDP"},
            {"name": "shut", "port": 516, "targetPort": CLOSED_PORT, "protocol": "UDP"},
        ]});
        let fields = extra_fields.as_object().expect("fields").clone();
        spec.as_object_mut().expect("a spec").extend(fields);
        let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "team"}, "spec": spec});
        self.cluster()
            .apply(&object.to_string())
            .await
            .expect("write a Service");
    }

    /// Writes the EndpointSlices of a Service, with ready endpoints. `pods` = the IPv4 and the IPv6 address of each pod.
    pub(crate) async fn write_endpoints(&self, service: &str, pods: &[[&str; 2]]) {
        let ready = json!({"ready": true, "serving": true, "terminating": false});
        let endpoints = pods.iter().map(|pod| (*pod, ready.clone())).collect::<Vec<_>>();
        self.write_endpoints_with(service, &endpoints).await;
    }

    /// Like [`Self::write_endpoints`], with the conditions of each endpoint.
    pub(crate) async fn write_endpoints_with(&self, service: &str, pods: &[([&str; 2], Value)]) {
        let mut text = String::new();
        for (family, kind) in ["IPv4", "IPv6"].into_iter().enumerate() {
            let endpoints = pods.iter();
            let endpoints =
                endpoints.map(|(pod, conditions)| json!({"addresses": [pod[family]], "conditions": conditions}));
            let slice = json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": kind,
                "metadata": {
                    "name": format!("{service}-{}", kind.to_lowercase()), "namespace": "team",
                    "labels": {"kubernetes.io/service-name": service},
                },
                "ports": [
                    {"name": "sql", "port": TCP_PORT, "protocol": "TCP"},
                    {"name": "log", "port": UDP_PORT, "protocol": "UDP"},
                    {"name": "mute", "port": MUTE_PORT, "protocol": "UDP"},
                    {"name": "shut", "port": CLOSED_PORT, "protocol": "UDP"},
                ],
                "endpoints": endpoints.collect::<Vec<_>>(),
            });
            text.push_str(&format!("{slice}\n---\n"));
        }
        self.cluster().apply(&text).await.expect("write EndpointSlices");
    }
}
