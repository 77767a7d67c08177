// The control plane for the local system and the tests, and kubectl, in one program made from ordinary Go modules.
// The name it is called by (a symlink) chooses the program; called by another name, its first argument does.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func run(name string) (known bool) {
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(kcm.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubectl":
		// As kubectl's own main does: errors in kubectl's words, and its exit codes.
		if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
			util.CheckErr(err)
		}
	default:
		return false
	}
	return true
}

func main() {
	if run(filepath.Base(os.Args[0])) {
		return
	}
	if len(os.Args) > 1 {
		os.Args = os.Args[1:] // cobra and etcd read os.Args
		if run(os.Args[0]) {
			return
		}
	}
	fmt.Fprintln(os.Stderr, "usage: etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubectl [flags of that program]")
	os.Exit(2)
}
