package command

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
)

// Whatever of a card decides samples is shown: each field changes what is printed for people and for programs.
func TestModelInfo_ShowsTheWholeCard(t *testing.T) {
	made := func() *model.Info {
		return &model.Info{Card: model.Card{
			Name: "m", Family: "f", Grid: "linspace", Mu: model.MuConstant, ConstantMu: 0.5, LatentChannels: 16,
			PixelsPerToken: 16, Size: media.Size{Frames: 9, Height: 64, Width: 64}, MaxFrames: 33, FramesPerToken: 4, FPS: 8,
			Prompts: 2, Guidance: 3.5, Conditioning: []string{"prompt_embeds"}, Masks: map[string]string{"prompt_embeds": "a"},
			SchedulerConfig: []byte(`{"shift": 3}`), Reward: []string{"r"}, Prediction: "epsilon",
		}}
	}
	show := func(i *model.Info) (string, string) {
		var b strings.Builder
		printInfo(&b, "dir", i)
		fields, err := json.Marshal(infoJSON(i))
		if err != nil {
			t.Fatal(err)
		}
		return b.String(), string(fields)
	}
	text, fields := show(made())
	for _, f := range reflect.VisibleFields(reflect.TypeFor[model.Card]()) {
		if f.Name == "WeightsDigest" || f.Anonymous { // the weights are not read; the parts of Size come by themselves
			continue
		}
		info := made()
		v := reflect.ValueOf(&info.Card).Elem().FieldByIndex(f.Index)
		switch x := v.Addr().Interface().(type) {
		case *string:
			*x += "x"
		case *int:
			*x += 48
		case *int64:
			*x += 1 << 30
		case *float32:
			*x++
		case *float64:
			*x++
		case *bool:
			*x = !*x
		case *[]string:
			*x = append(*x, "more")
		case *json.RawMessage:
			*x = []byte(`{"shift": 4}`)
		case **model.Pipeline:
			*x = &model.Pipeline{Class: "EditPipeline", Conditions: []model.Input{{Name: "image", Type: "image", Required: true}}}
		case *map[string]string:
			*x = map[string]string{"prompt_embeds": "b"}
		default:
			t.Fatalf("%s: a field of type %s", f.Name, f.Type)
		}
		if f.Name == "Mu" {
			info.Mu = model.MuNone
		}
		asText, asFields := show(info)
		if asFields == fields {
			t.Errorf("%s is not in --json", f.Name)
		}
		if asText == text && f.Name != "SchedulerConfig" { // it is long
			t.Errorf("%s is not printed", f.Name)
		}
	}
}

// A card that JSON cannot have is still an answer, which says why.
func TestModelInfo_WhatJSONHasNot(t *testing.T) {
	for _, card := range []model.Card{{Name: "m", FPS: math.Inf(1)}, {Name: "m", SchedulerConfig: []byte("{")}} {
		data, err := json.Marshal(infoJSON(&model.Info{Card: card}))
		if err != nil || !strings.Contains(string(data), `"name":"m"`) || !strings.Contains(string(data), `["card: json: `) {
			t.Errorf("%s %v; want the name, and a problem of the card", data, err)
		}
	}
}
