// Says what other people's programs make of a JobRequest: kstatus (which Flux, Helm and kpt judge by) by its own
// library, and Argo CD by our Lua, run by the interpreter that Argo CD uses.
//
// Usage: judges ARGOCD-CM.yaml < OBJECTS
//
// OBJECTS are JSON, one a line. For each, one line of JSON:
//
//	{"kstatus": "Current", "health": "Healthy", "message": "...", "actions": {"retry": <the object after it>}}
//
// actions holds those that Argo CD would offer.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"
)

const resource = "jobrequest.dev_JobRequest"

type customization struct {
	health  string
	actions struct {
		Discovery   string `json:"discovery.lua"`
		Definitions []struct {
			Name   string `json:"name"`
			Action string `json:"action.lua"`
		} `json:"definitions"`
	}
}

type judgement struct {
	Kstatus string         `json:"kstatus"`
	Health  string         `json:"health"`
	Message string         `json:"message"`
	Actions map[string]any `json:"actions"`
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(path string) error {
	ours, err := read(path)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 8<<20)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var object unstructured.Unstructured
		if err := object.UnmarshalJSON(lines.Bytes()); err != nil {
			return err
		}
		answer, err := ours.judge(object)
		if err != nil {
			return err
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
	return lines.Err()
}

func read(path string) (ours customization, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return ours, err
	}
	var configMap struct {
		Data map[string]string `json:"data"`
	}
	if err := yaml.Unmarshal(text, &configMap); err != nil {
		return ours, err
	}
	ours.health = configMap.Data["resource.customizations.health."+resource]
	actions := configMap.Data["resource.customizations.actions."+resource]
	if ours.health == "" || actions == "" {
		return ours, fmt.Errorf("%s has no health check or no actions of %s", path, resource)
	}
	return ours, yaml.UnmarshalStrict([]byte(actions), &ours.actions)
}

func (ours customization) judge(object unstructured.Unstructured) (answer judgement, err error) {
	found, err := status.Compute(&object)
	if err != nil {
		return answer, err
	}
	answer.Kstatus = found.Status.String()
	health, err := evaluate(ours.health, object.Object)
	if err != nil {
		return answer, err
	}
	fields, _ := health.(map[string]any)
	answer.Health, _ = fields["status"].(string)
	answer.Message, _ = fields["message"].(string)
	offered, err := evaluate(ours.actions.Discovery, object.Object)
	if err != nil {
		return answer, err
	}
	answer.Actions = map[string]any{}
	for name, settings := range offered.(map[string]any) {
		if fields, _ := settings.(map[string]any); fields["disabled"] == true {
			continue
		}
		after, err := ours.act(name, object.Object)
		if err != nil {
			return answer, err
		}
		answer.Actions[name] = after
	}
	return answer, nil
}

func (ours customization) act(name string, object map[string]any) (any, error) {
	for _, definition := range ours.actions.Definitions {
		if definition.Name == name {
			return evaluate(definition.Action, object)
		}
	}
	return nil, fmt.Errorf("the action %s is offered and not defined", name)
}

// evaluate runs a script with the object as obj, and with the libraries that Argo CD gives it.
func evaluate(script string, object map[string]any) (any, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	libraries := []struct {
		name string
		open lua.LGFunction
	}{
		{lua.LoadLibName, lua.OpenPackage},
		{lua.BaseLibName, lua.OpenBase},
		{lua.TabLibName, lua.OpenTable},
		{lua.StringLibName, lua.OpenString},
		{lua.MathLibName, lua.OpenMath},
		{lua.OsLibName, lua.OpenOs},
	}
	for _, library := range libraries {
		state.Push(state.NewFunction(library.open))
		state.Push(lua.LString(library.name))
		state.Call(1, 0)
	}
	state.SetGlobal("obj", toLua(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	return fromLua(state.Get(-1)), nil
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, field := range value {
			table.RawSetString(key, toLua(state, field))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, item := range value {
			table.Append(toLua(state, item))
		}
		return table
	case string:
		return lua.LString(value)
	case int64:
		return lua.LNumber(value)
	case float64:
		return lua.LNumber(value)
	case bool:
		return lua.LBool(value)
	default:
		return lua.LNil
	}
}

func fromLua(value lua.LValue) any {
	switch value := value.(type) {
	case *lua.LTable:
		if value.Len() > 0 {
			items := make([]any, 0, value.Len())
			value.ForEach(func(_, item lua.LValue) { items = append(items, fromLua(item)) })
			return items
		}
		fields := map[string]any{}
		value.ForEach(func(key, field lua.LValue) { fields[key.String()] = fromLua(field) })
		return fields
	case lua.LString:
		return string(value)
	case lua.LNumber:
		return float64(value)
	case lua.LBool:
		return bool(value)
	default:
		return nil
	}
}
