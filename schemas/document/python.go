package document

import (
	"encoding/json"
	"reflect"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// pythonFile is what the Python package reads of the contract, from the folder of package schemas.
const pythonFile = "../pkg/client/python/meander/data/contract.json"

// forms is the shape of all events, for readers without types. A form is int, number, str, bool, bytes, map, any, the
// name of a struct, [FORM] of a list, or FORM? of what may be absent or null.
type forms struct {
	Events  map[string]string            `json:"events"`  // the struct of each event
	Structs map[string]map[string]string `json:"structs"` // the form of each field
	// Settings are those of a sample, with the field by which readers have each (see schemas.Field.Through).
	Settings    map[string]string    `json:"settings"`
	Transitions []schemas.Transition `json:"transitions"`
	// Estimators are all there are.
	Estimators []estimator.Properties `json:"estimators"`
}

// contractForms returns the forms of all events as JSON.
func contractForms() ([]byte, error) {
	data, err := json.MarshalIndent(formsOfEvents(), "", " ")
	return append(data, '\n'), err
}

// formsOfEvents returns the forms as the fields of the structs and their tags say. What Python reads in contract.json,
// TypeScript has as the constant structs.
func formsOfEvents() forms {
	x := forms{map[string]string{}, map[string]map[string]string{}, map[string]string{}, schemas.Transitions, nil}
	for _, name := range estimator.Names() {
		x.Estimators = append(x.Estimators, estimator.PropertiesOf(name))
	}
	types := map[string]reflect.Type{}
	for _, e := range schemas.Events() {
		t := reflect.TypeOf(e).Elem()
		x.Events[e.Type()] = t.Name()
		types[t.Name()] = t
		collectTypes(t, types)
	}
	for name, t := range types {
		fields := map[string]string{}
		for _, f := range schemas.Fields(t) {
			form := formOf(f.Type)
			if f.Optional && f.Type.Kind() != reflect.Pointer {
				form += "?"
			}
			fields[f.Name] = form
		}
		x.Structs[name] = fields
	}
	for _, f := range schemas.Fields(reflect.TypeFor[schemas.Sampling]()) {
		if x.Settings[f.Name] = f.Through; f.Through == "" {
			x.Settings[f.Name] = f.Name
		}
	}
	return x
}

// formOf returns the form of a type.
func formOf(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[schemas.Truth]():
		return "any?"
	case reflect.TypeFor[schemas.Metadata]():
		return "map"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return formOf(t.Elem()) + "?"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return "bytes"
		}
		return "[" + formOf(t.Elem()) + "]"
	case reflect.Struct:
		return t.Name()
	case reflect.Bool:
		return "bool"
	case reflect.Float32, reflect.Float64:
		return "number"
	case reflect.String:
		return "str"
	case reflect.Map:
		return "map"
	}
	return "int"
}
