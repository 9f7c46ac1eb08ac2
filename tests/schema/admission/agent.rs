//! Tests the ValidatingAdmissionPolicy of `deploy/agent.yaml`: what an agent may write into Nodes.

use super::*;

// threat: stolen-agent-token
#[tokio::test]
async fn agent_writes_only_its_own_annotations_on_its_own_node() {
    let server = server(None).await;
    let other = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}});
    server.post("/api/v1/nodes", &other).await.unwrap();
    // An agent outside the DaemonSet, with the ServiceAccount of docs/operations/install.md.
    let host_account = format!("{AGENT}.n2");
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "wg-agent.n2"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "wg-agent"},
        "subjects": [{"kind": "ServiceAccount", "name": "wg-agent.n2", "namespace": "clustermesh-agent"}],
    });
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    server.post(bindings, &binding).await.unwrap();
    let agent = server.client_as(AGENT, &[("authentication.kubernetes.io/node-name", "n1")]);
    let (unbound, host) = (server.client_as(AGENT, &[]), server.client_as(&host_account, &[]));
    let annotations = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
    let key = annotations("kilo.squat.ai/key", json!("k"));
    assert_eq!(agent.patch("/api/v1/nodes/n1", &key).await.map(drop), Ok(()));
    assert_eq!(host.patch("/api/v1/nodes/n2", &key).await.map(drop), Ok(()));
    let not_own_node = |node: &str| {
        format!(
            "an agent may write only its own Node, and this token does not belong to a pod on {node}; an agent outside the DaemonSet needs \
             the account clustermesh-agent/wg-agent.{node}"
        )
    };
    let only_annotations = "an agent may write only annotations of its Node".to_owned();
    let foreign_annotation = |name: &str| format!("an agent may not write the annotation {name}");
    for (client, node, change, message) in [
        (
            &agent,
            "n2",
            annotations("kilo.squat.ai/key", json!("x")),
            not_own_node("n2"),
        ),
        (
            &unbound,
            "n1",
            annotations("kilo.squat.ai/key", json!("j")),
            not_own_node("n1"),
        ),
        (
            &host,
            "n1",
            annotations("kilo.squat.ai/key", json!("j")),
            not_own_node("n1"),
        ),
        (
            &agent,
            "n1",
            annotations("team", json!(null)),
            foreign_annotation("team"),
        ),
        (
            &agent,
            "n1",
            annotations("kilo.squat.ai/force-endpoint", json!("192.0.2.1:1")),
            foreign_annotation("kilo.squat.ai/force-endpoint"),
        ),
        (
            &agent,
            "n1",
            json!({"metadata": {"labels": {"a": "b"}}}),
            only_annotations.clone(),
        ),
        (
            &host,
            "n2",
            json!({"spec": {"unschedulable": true}}),
            only_annotations.clone(),
        ),
        (
            &agent,
            "n1",
            json!({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
            only_annotations,
        ),
    ] {
        let refused = client.patch(&format!("/api/v1/nodes/{node}"), &change).await;
        assert_eq!(verdict(refused), Err(message));
    }
    // The policy does not restrict other users.
    assert_eq!(
        server
            .patch("/api/v1/nodes/n2", &json!({"metadata": {"labels": {"a": "b"}}}))
            .await
            .map(drop),
        Ok(())
    );
}

/// Compares the rights that the API server reports for the account with a list, to which each new right must be added, too.
// threat: stolen-agent-token
#[tokio::test]
async fn agent_account_has_exactly_the_rights_it_uses() {
    let server = server(None).await;
    let agent = server.client_as(AGENT, &[]);
    let rights = async |namespace: &str| -> Vec<String> {
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace},
        });
        let reviews = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
        let answer = agent.post(reviews, &review).await.unwrap();
        let words = |rule: &Value, field: &str| -> String {
            let words = rule[field].as_array().into_iter().flatten();
            words.filter_map(Value::as_str).collect::<Vec<_>>().join(",")
        };
        let rules = answer["status"]["resourceRules"].as_array().unwrap().iter();
        // Every account may ask for its own rights.
        let rules = rules.filter(|rule| {
            !words(rule, "apiGroups").ends_with(".k8s.io") || !words(rule, "resources").starts_with("selfsubject")
        });
        let mut rights: Vec<String> = rules
            .map(|rule| {
                ["resources", "resourceNames", "verbs"]
                    .map(|field| words(rule, field))
                    .join(" ")
            })
            .collect();
        rights.sort();
        rights
    };
    let everywhere = [
        "csinodes  list,watch",
        // The agent reads other Nodes with `get` and `list`, and uses `watch` and `patch` for its own Node. The
        // ValidatingAdmissionPolicy limits `patch` to that Node.
        "nodes  get,list,watch,patch",
        "peers,peerpolicies  list,watch",
    ];
    let with = |more: &[&str]| {
        let mut rights: Vec<String> = everywhere.iter().chain(more).map(|right| (*right).to_owned()).collect();
        rights.sort();
        rights
    };
    assert_eq!(rights("default").await, with(&["endpointslices  list,watch"]));
    assert_eq!(rights("kube-system").await, with(&["configmaps cilium-config get"]));
    assert_eq!(rights("clustermesh-agent").await, with(&[]));
}
