//! Whatever a name resolves to and however an address is written: no connection is opened that the policy refuses.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use jobrequest::kinds::KindSettings;
use jobrequest::kinds::egress::EgressPolicy;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::{attempt, executor};

/// Addresses that have a server each, all at one port.
const SERVED: [Ipv4Addr; 8] = [
    Ipv4Addr::new(127, 0, 0, 1),
    Ipv4Addr::new(127, 0, 0, 2),
    Ipv4Addr::new(127, 0, 1, 1),
    Ipv4Addr::new(127, 1, 0, 1),
    Ipv4Addr::new(127, 1, 2, 3),
    Ipv4Addr::new(127, 64, 0, 1),
    Ipv4Addr::new(127, 128, 0, 1),
    Ipv4Addr::new(127, 255, 255, 254),
];

/// Addresses that no policy of this test opens.
const NEVER: [&str; 6] = ["10.0.0.5", "169.254.169.254", "0.0.0.0", "::1", "fe80::1", "fd00::1"];

type Reached = Arc<Mutex<BTreeSet<Ipv4Addr>>>;

/// A server on each address, and the addresses whose server was called.
async fn servers() -> (u16, Reached) {
    let (port, listeners) = loop {
        let first = TcpListener::bind((SERVED[0], 0)).await.unwrap();
        let port = first.local_addr().unwrap().port();
        let mut listeners = vec![first];
        for address in &SERVED[1..] {
            listeners.extend(TcpListener::bind((*address, port)).await);
        }
        if listeners.len() == SERVED.len() {
            break (port, listeners);
        }
    };
    let reached = Reached::default();
    for (listener, address) in listeners.into_iter().zip(SERVED) {
        let reached = reached.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                reached.lock().unwrap().insert(address);
                tokio::spawn(async move {
                    let mut read = Vec::new();
                    while !read.ends_with(b"\r\n\r\n{}") {
                        if stream.read_buf(&mut read).await.is_ok_and(|length| length == 0) {
                            return;
                        }
                    }
                    drop(stream.write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await);
                });
            }
        });
    }
    (port, reached)
}

/// Ranges within 127.0.0.0/8 as a number of bits and an address in it.
type Nets = Vec<(u8, Ipv4Addr)>;

fn contains(nets: &[(u8, Ipv4Addr)], address: Ipv4Addr) -> bool {
    nets.iter().any(|(bits, net)| (u32::from(*net) ^ u32::from(address)) >> (32 - bits) == 0)
}

#[derive(Debug, Clone)]
enum Host {
    Literal(Ipv4Addr, usize),
    /// What each look-up answers; the last one for ever.
    Name(Vec<Vec<IpAddr>>),
}

fn written(address: Ipv4Addr, notation: usize) -> String {
    let [a, b, c, d] = address.octets();
    let number = u32::from(address);
    match notation % 8 {
        0 => address.to_string(),
        1 => number.to_string(),
        2 => format!("{number:#x}"),
        3 => format!("0{number:o}"),
        4 => format!("{a:#x}.0{b:o}.{c}.{d:#x}"),
        5 => format!("{a}.{}", number & 0x00ff_ffff),
        6 => format!("[{}]", address.to_ipv6_mapped()),
        _ => format!("{a}。{b}．{c}｡{d}."),
    }
}

fn nets() -> impl Strategy<Value = Nets> {
    let net = (9_u8..=32, prop::sample::select(SERVED.to_vec()));
    prop::collection::vec(net, 0..4)
}

fn answered() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        6 => prop::sample::select(SERVED.to_vec()).prop_map(IpAddr::V4),
        2 => prop::sample::select(SERVED.to_vec()).prop_map(|v4| IpAddr::V6(v4.to_ipv6_mapped())),
        1 => prop::sample::select(NEVER.to_vec()).prop_map(|ip| ip.parse().unwrap()),
    ]
}

fn host() -> impl Strategy<Value = Host> {
    let answers = prop::collection::vec(prop::collection::vec(answered(), 1..4), 1..4);
    prop_oneof![
        (prop::sample::select(SERVED.to_vec()), 0_usize..8)
            .prop_map(|(address, notation)| Host::Literal(address, notation)),
        answers.prop_map(Host::Name),
    ]
}

struct Script {
    answers: Vec<Vec<IpAddr>>,
    asked: AtomicUsize,
}

impl Resolve for Script {
    fn resolve(&self, _: Name) -> Resolving {
        let turn = self.asked.fetch_add(1, Ordering::SeqCst).min(self.answers.len() - 1);
        let addresses: Vec<_> = self.answers[turn].iter().map(|ip| SocketAddr::new(*ip, 0)).collect();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

fn listed(nets: &[(u8, Ipv4Addr)]) -> String {
    nets.iter().map(|(bits, net)| format!("{net}/{bits}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn no_connection_ever_reaches_an_address_that_the_policy_refuses() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (port, reached) = runtime.block_on(servers());
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() });
    let called = Cell::new(0);
    let result = runner.run(&(nets(), nets(), host()), |(allow, deny, host)| {
        let (text, answers) = match &host {
            Host::Literal(address, notation) => (written(*address, *notation), vec![vec![IpAddr::V4(*address)]]),
            Host::Name(answers) => ("rebinding.test".to_owned(), answers.clone()),
        };
        let settings = KindSettings {
            egress: EgressPolicy::parse(&listed(&allow), &listed(&deny)).unwrap(),
            resolver: Some(Arc::new(Script { answers: answers.clone(), asked: AtomicUsize::new(0) })),
            ..KindSettings::default()
        };
        let executor = executor("webhook_delivery", &settings);
        let payload = json!({"url": format!("http://{text}:{port}/"), "body": {}});
        let may_reach = |ip: &IpAddr| match ip {
            IpAddr::V4(v4) => contains(&allow, *v4) && !contains(&deny, *v4),
            IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some_and(|v4| contains(&allow, v4) && !contains(&deny, v4)),
        };
        for turn in 0..3 {
            reached.lock().unwrap().clear();
            let outcome = runtime.block_on(executor.execute(&attempt(&payload)));
            let reached: Vec<IpAddr> = reached.lock().unwrap().iter().map(|v4| IpAddr::V4(*v4)).collect();
            let answer = &answers[turn.min(answers.len() - 1)];
            if answer.iter().all(may_reach) {
                called.set(called.get() + 1);
                prop_assert!(outcome.is_ok(), "{text} {answer:?}: {outcome:?}");
                prop_assert!(!reached.is_empty() && reached.iter().all(may_reach), "{answer:?}: {reached:?}");
            } else {
                prop_assert_eq!(outcome.unwrap_err().reason(), "AddressNotAllowed");
                prop_assert!(reached.is_empty(), "{:?} reached {:?}", answer, reached);
            }
        }
        Ok(())
    });
    result.unwrap();
    let called = called.get();
    assert!(called > 50, "only {called} calls were allowed: the property was hardly tried");
}
