//! NetworkPolicies: who may talk to whom, judged as a network plugin would.

use std::net::IpAddr;

use ipnet::IpNet;
use jobrequest::kinds::egress::EgressPolicy;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::*;

const ON: &str = "networkPolicy.enabled=true";

/// Whether a policy lets its Pods open a connection to an address outside the cluster's Pods.
fn reaches(policy: &Value, address: &str, port: u16) -> bool {
    let address: IpAddr = address.parse().unwrap();
    let within = |cidr: &Value| cidr.as_str().unwrap().parse::<IpNet>().unwrap().contains(&address);
    let ports = |rule: &Value| rule["ports"].is_null() || list(&rule["ports"]).any(|open| open["port"] == port);
    let peers = |rule: &Value| {
        // No peers at all means everybody.
        list(&rule["to"]).next().is_none()
            || list(&rule["to"])
                .map(|peer| &peer["ipBlock"])
                .any(|block| block.is_object() && within(&block["cidr"]) && !list(&block["except"]).any(within))
    };
    list(&policy["spec"]["egress"]).any(|rule| ports(rule) && peers(rule))
}

fn policy<'a>(objects: &'a [Value], name: &str) -> &'a Value {
    named(objects, "NetworkPolicy", name)
}

#[test]
fn there_are_no_policies_unless_they_are_asked_for() {
    assert_eq!(of_kind(&render("minimal", &[]), "NetworkPolicy").count(), 0);
}

#[test]
fn every_pod_of_the_chart_is_under_exactly_one_policy() {
    for mode in ["InitContainer", "Job"] {
        let objects = render("minimal", &[ON, &format!(r#"migrate.mode="{mode}""#)]);
        for workload in workloads(&objects) {
            let labels = &workload["spec"]["template"]["metadata"]["labels"];
            let selects = |policy: &&Value| {
                let selector = policy["spec"]["podSelector"]["matchLabels"].as_object().unwrap();
                selector.iter().all(|(key, value)| labels[key] == *value)
            };
            let over: Vec<_> = of_kind(&objects, "NetworkPolicy").filter(selects).collect();
            assert_eq!(over.len(), 1, "{}", workload["metadata"]["name"]);
            assert_eq!(over[0]["spec"]["policyTypes"], json!(["Ingress", "Egress"]), "what isn't named is refused");
        }
    }
}

#[test]
fn workers_have_no_way_to_the_api_server() {
    let sets = [ON, r#"networkPolicy.apiServer.cidrs=["10.96.0.1/32","172.18.0.2/32","34.118.1.2/32"]"#];
    // Also where jobs may call the whole private network around it.
    for allow in ["[]", r#"["10.0.0.0/8"]"#, r#"["10.96.0.0/16","172.16.0.0/12"]"#, r#"["10.96.0.1/32"]"#] {
        let objects = render("minimal", &[&sets[..], &[&format!("egress.allow={allow}")]].concat());
        let (controller, worker) = (policy(&objects, "jobrequest-controller"), policy(&objects, "jobrequest-worker"));
        for address in ["10.96.0.1", "172.18.0.2", "34.118.1.2"] {
            for port in [443, 6443] {
                assert!(reaches(controller, address, port), "{address}:{port}");
                assert!(!reaches(worker, address, port), "{address}:{port} with egress.allow={allow}");
            }
        }
        assert!(!reaches(controller, "10.96.0.1", 80) && !reaches(controller, "198.41.0.4", 443));
        for program in [controller, worker] {
            assert!(reaches(program, "10.9.9.9", 53) && reaches(program, "10.9.9.9", 5432), "DNS and Postgres");
        }
        assert!(reaches(worker, "198.41.0.4", 443), "the public Internet");
        assert_eq!(reaches(worker, "10.96.7.7", 443), allow.len() > 20 || allow.contains("/8"), "{allow}");
    }
}

/// The chart can't call the program, so it has a list of its own; where they differ, jobs would fail in a way that no
/// error explains, or the network would be open where the program alone refuses.
#[test]
fn the_network_is_open_to_jobs_where_the_program_is() {
    let (allow, deny) = ("10.1.0.0/16,192.168.4.0/22,fd00:1::/32", "10.1.2.0/24,93.184.0.0/16,2606:2800::/32");
    let cidrs = |list: &str| json!(list.split(',').collect::<Vec<_>>());
    let sets = [ON, &format!("egress.allow={}", cidrs(allow)), &format!("egress.deny={}", cidrs(deny))];
    let objects = render("minimal", &sets);
    let worker = policy(&objects, "jobrequest-worker");
    let program = EgressPolicy::parse(allow, deny).unwrap();
    // The first and last address of every range that either knows, their neighbours, and addresses at random.
    let blocks = list(&worker["spec"]["egress"]).flat_map(|rule| list(&rule["to"])).map(|peer| &peer["ipBlock"]);
    let ranges =
        blocks.flat_map(|block| strings(&block["except"]).into_iter().chain(block["cidr"].as_str().map(str::to_owned)));
    let ranges: Vec<IpNet> = ranges.chain(deny.split(',').map(str::to_owned)).map(|net| net.parse().unwrap()).collect();
    assert!(ranges.len() > 25, "{ranges:?}");
    let edges = ranges.iter().flat_map(|net| [net.network(), net.broadcast()]).flat_map(|address| {
        [-1_i8, 0, 1].map(|step| match address {
            IpAddr::V4(v4) => IpAddr::from(u32::from(v4).wrapping_add_signed(step.into()).to_be_bytes()),
            IpAddr::V6(v6) => IpAddr::from(u128::from(v6).wrapping_add_signed(step.into()).to_be_bytes()),
        })
    });
    let mut random = rand::rngs::StdRng::seed_from_u64(7);
    let addresses = (0..20_000).map(|n| {
        if n % 2 == 0 { IpAddr::from(random.random::<[u8; 4]>()) } else { IpAddr::from(random.random::<[u8; 16]>()) }
    });
    for address in edges.chain(addresses) {
        // Addresses that carry another inside are judged by the program alone: the network leaves them closed.
        let carries = ["2002::/16", "64:ff9b::/96", "::ffff:0:0/96"].map(|net| net.parse::<IpNet>().unwrap());
        if !carries.iter().any(|net| net.contains(&address)) {
            assert_eq!(reaches(worker, &address.to_string(), 8443), program.check(address).is_ok(), "{address}");
        }
    }
}

#[test]
fn what_is_closed_whole_opens_nothing_by_accident() {
    let objects = render("minimal", &[ON, r#"egress.deny=["0.0.0.0/0","::/0"]"#, r#"egress.allow=["10.0.0.0/8"]"#]);
    let worker = policy(&objects, "jobrequest-worker");
    assert_eq!(list(&worker["spec"]["egress"]).count(), 2, "DNS and Postgres");
    assert!(!reaches(worker, "93.184.215.14", 443) && !reaches(worker, "10.0.0.1", 443));
}

#[test]
fn only_the_http_port_is_open_and_only_to_those_named() {
    let objects = render("all", &[]);
    let from = json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]);
    for name in ["jr-controller", "jr-worker"] {
        let ingress = &policy(&objects, name)["spec"]["ingress"];
        assert_eq!(*ingress, json!([{"ports": [{"protocol": "TCP", "port": "http"}], "from": from}]), "{name}");
    }
    let migrate = policy(&objects, "jr-migrate");
    assert!(migrate["spec"]["ingress"].is_null(), "nobody calls a migration");
    let objects = render("minimal", &[ON]);
    let ingress = &policy(&objects, "jobrequest-worker")["spec"]["ingress"];
    assert_eq!(*ingress, json!([{"ports": [{"protocol": "TCP", "port": "http"}]}]), "everybody, if nobody is named");
}
