package view

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Settings are what a run was asked for and made with.
type Settings struct {
	// Prompts, Groups and Samples are how many were looked at: the first ones.
	Prompts int       `json:"prompts"`
	Groups  int       `json:"groups"`
	Samples int       `json:"samples"`
	Whole   bool      `json:"whole"` // they are all of them
	List    []Setting `json:"settings"`
	// Again says how it is made again; nil: its prompts are not stored.
	Again *Again `json:"again,omitempty"`
}

// Setting is one setting of a run.
type Setting struct {
	// Part is what it is of; Name is that of the field, as prompts and the command line know it.
	Part string `json:"part"`
	Name string `json:"name"`
	// Value is what all have, or the values with how often each is there.
	Value string `json:"value"`
	// Given says that prompts had it. Varies, that there are several values.
	Given  bool `json:"given,omitempty"`
	Varies bool `json:"varies,omitempty"`
}

// Again says how a run is made again, by the same prompts.
type Again struct {
	Command string `json:"command"`
	Python  string `json:"python"`
	// Notes say what both need, and what they leave out.
	Notes []string `json:"notes"`
}

// Given is a prompt as it was published.
type Given struct {
	*schemas.Prompt
	// JSON is the prompt with its own fields alone.
	JSON json.RawMessage
}

// maxLooked is how many prompts, groups and samples of a run are looked at for its settings.
const maxLooked = 200

// Prompts returns the stored prompts of a run as people published them, the first ones, at most most; fresh groups that
// the pipeline asked for itself are left out. whole: there are no more.
func Prompts(ctx context.Context, b *bus.Bus, run schemas.Run, most int) (list []Given, whole bool, err error) {
	filter := []string{schemas.PromptSubject(run)}
	for m, err := range b.Read(ctx, schemas.StreamPrompts, filter, bus.ReadOptions{}) {
		if err != nil {
			return nil, false, fmt.Errorf("read prompts: %w", err)
		}
		p := &schemas.Prompt{}
		if schemas.Decode(m.Data, p) != nil || p.Refill != nil {
			continue
		}
		if len(list) == most {
			return list, false, nil
		}
		p.UID = p.GroupUID(m.Seq)
		data, err := json.Marshal(schemas.JSONOfBytes(m.Data))
		if err != nil {
			return nil, false, fmt.Errorf("prompt %s: %w", p.UID, err)
		}
		list = append(list, Given{p, data})
	}
	return list, true, nil
}

// Settings returns the settings of a run, taken from what is stored of it.
func (r *Reader) Settings(ctx context.Context, run schemas.Run) (*Settings, error) {
	prompts, all, err := Prompts(ctx, r.bus, run, maxLooked)
	if err != nil {
		return nil, err
	}
	s, t := &Settings{Prompts: len(prompts), Whole: all}, &tally{at: map[string]*counted{}}
	samples := []string{schemas.TrajectorySubject(run, "*", 0, "*")}
	var first *schemas.Trajectory
	for m, err := range firstOf(r.bus.Read(ctx, schemas.StreamTrajectories, samples, bus.ReadOptions{})) {
		if err != nil {
			return nil, err
		}
		x := &schemas.Trajectory{}
		if bus.Fits(m, x) == nil {
			s.Samples, first = s.Samples+1, cmp.Or(first, x)
			t.addSample(x)
		}
	}
	if err := r.addModel(ctx, t, run, first); err != nil {
		return nil, err
	}
	groups := []string{schemas.GroupSubject(run, "*")}
	for m, err := range firstOf(r.bus.Read(ctx, schemas.StreamGroups, groups, bus.ReadOptions{})) {
		if err != nil {
			return nil, err
		}
		x := &schemas.GroupRecord{}
		if bus.Fits(m, x) == nil && x.Error == "" {
			s.Groups++
			t.add(partScores, "group_size", strconv.FormatInt(x.GroupSize, 10))
			t.addGroup(&x.Group)
		}
	}
	for _, p := range prompts {
		t.addPrompt(p.Prompt)
	}
	if s.Prompts+s.Groups+s.Samples == 0 {
		return nil, bus.ErrNotFound
	}
	s.Whole = s.Whole && s.Groups < maxLooked
	s.List = t.list()
	if r.Again != nil && len(prompts) > 0 {
		s.Again = r.Again(run, prompts, all)
	}
	return s, nil
}

// firstOf yields the first messages of a reading, at most maxLooked.
func firstOf(read iter.Seq2[*bus.Message, error]) iter.Seq2[*bus.Message, error] {
	return func(yield func(*bus.Message, error) bool) {
		n := 0
		for m, err := range read {
			if n++; n > maxLooked || !yield(m, err) {
				return
			}
		}
	}
}

// The parts of the settings, in their order.
const (
	partModel   = "Model"
	partSamples = "Sampling"
	partScores  = "Groups, rewards and advantages"
)

var parts = []string{partModel, partSamples, partScores}

// addModel adds what the samples were made with, from the first of them to the newest.
func (r *Reader) addModel(ctx context.Context, t *tally, run schemas.Run, first *schemas.Trajectory) error {
	if first == nil {
		return nil
	}
	if p, err := r.bus.Policy(ctx, first.Lineage()); err == nil {
		t.add(partModel, "network", p.Model)
	} else if !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	m, err := r.bus.Last(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(run, "*", 0, "*"))
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	last := &schemas.Trajectory{}
	if err != nil || bus.Fits(m, last) != nil {
		last = first
	}
	version := strconv.FormatInt(first.PolicyVersionMin, 10)
	if last.PolicyVersionMax != first.PolicyVersionMin {
		version += fmt.Sprintf(" to %d", last.PolicyVersionMax)
	}
	t.add(partModel, "policy_version", version)
	if first.Tenant != "" {
		t.add(partModel, "tenant", string(first.Tenant))
	}
	return r.addSource(ctx, t, first)
}

// addSource adds where the checkpoint and the adapter of a sample are from, as the policy says that it was made with.
func (r *Reader) addSource(ctx context.Context, t *tally, of *schemas.Trajectory) error {
	history, err := r.bus.PolicyHistory(ctx, of.Lineage())
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	for _, p := range history {
		if p.WeightsDigest != of.WeightsDigest {
			continue
		}
		if p.Source != "" {
			t.add(partModel, "source", p.Source)
		}
		if p.Adapter != nil && p.Adapter.Source != "" {
			t.add(partModel, "adapter", p.Adapter.Source)
		}
		break
	}
	return nil
}

// counted are the values of one setting, in the order in which they came.
type counted struct {
	Setting
	values []string
	times  map[string]int
	own    bool // the prompts alone have it
}

// tally counts the values of settings.
type tally struct {
	names []string
	at    map[string]*counted
}

// add counts a value.
func (t *tally) add(part, name, value string) {
	c := t.at[name]
	if c == nil {
		c = &counted{Setting: Setting{Part: part, Name: name}, times: map[string]int{}}
		t.at[name], t.names = c, append(t.names, name)
	}
	if c.times[value] == 0 {
		c.values = append(c.values, value)
	}
	c.times[value]++
}

// addSample counts the settings of a sample: those in which samples of a group are alike.
func (t *tally) addSample(x *schemas.Trajectory) {
	t.add(partModel, "model", string(x.Lane))
	t.add(partModel, "weights_digest", x.WeightsDigest)
	t.add(partModel, "backend", x.Backend)
	if x.Text != nil {
		t.addFields(partSamples, "text.", reflect.ValueOf(x.Text.Settings), nil)
		return
	}
	t.add(partSamples, "num_inference_steps", strconv.Itoa(len(x.Transitions)))
	t.addFields(partSamples, "", reflect.ValueOf(x.Sampling), func(f *schemas.Field) bool {
		return f.Digest != schemas.DigestContent
	})
}

// ofOne are the fields of a prompt that are its own, and no settings of a run.
var ofOne = []string{"v", "uid", "prompt", "messages", "metadata", "batch", "deadline", "refill", "substitutes"}

// addGroup counts the settings of a group that prompts have, too.
func (t *tally) addGroup(g *schemas.Group) {
	prompt := map[string]bool{}
	for _, f := range schemas.Fields(reflect.TypeFor[schemas.Prompt]()) {
		prompt[f.Name] = !slices.Contains(ofOne, f.Name)
	}
	t.addFields(partScores, "", reflect.ValueOf(g).Elem(), func(f *schemas.Field) bool { return prompt[f.Name] })
}

// addPrompt notes which settings a prompt gave, and counts those that nothing else has.
func (t *tally) addPrompt(p *schemas.Prompt) {
	asked := &tally{at: map[string]*counted{}}
	asked.addFields(partSamples, "", reflect.ValueOf(p).Elem(), func(f *schemas.Field) bool {
		return !slices.Contains(ofOne, f.Name)
	})
	if p.Seed == nil {
		t.add(partSamples, "seed", "the name of the run")
		t.at["seed"].own = true
	}
	for _, name := range asked.names {
		value := asked.at[name].values[0]
		name = strings.TrimPrefix(name, "rollout.")
		if c := t.at[name]; c != nil && !c.own {
			c.Given = true
			continue
		}
		t.add(partSamples, name, value)
		t.at[name].own, t.at[name].Given = true, true
	}
}

// addFields counts the values of the fields of a struct that are set, and of those in it.
func (t *tally) addFields(part, path string, v reflect.Value, wanted func(*schemas.Field) bool) {
	for _, f := range schemas.Fields(v.Type()) {
		if wanted != nil && !wanted(&f) {
			continue
		}
		x := f.In(v)
		if x.IsZero() && (f.Optional || x.Kind() == reflect.Slice) {
			continue
		}
		for x.Kind() == reflect.Pointer {
			x = x.Elem()
		}
		if x.Kind() == reflect.Struct {
			t.addFields(part, path+f.Name+".", x, nil)
			continue
		}
		if text := settingText(x); text != "" {
			t.add(part, path+f.Name, text)
		}
	}
}

// settingText says a value in one line.
func settingText(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case []schemas.RewardSpec:
		return rewardsText(x)
	case fmt.Stringer:
		return x.String()
	}
	switch v.Kind() {
	case reflect.String:
		return cut(v.String(), maxAnswer)
	case reflect.Slice:
		if kind := v.Type().Elem().Kind(); kind != reflect.Struct && kind != reflect.Uint8 {
			return listText(v)
		}
		fallthrough
	case reflect.Map:
		data, _ := json.Marshal(schemas.JSON(v.Interface())) // values of events always encode
		return cut(string(data), maxAnswer)
	}
	return fmt.Sprint(v.Interface())
}

// rewardsText names the functions of a sum with their weights.
func rewardsText(list []schemas.RewardSpec) string {
	texts := make([]string, len(list))
	for i, r := range list {
		texts[i] = r.Name
		if r.Weight != nil && *r.Weight != 1 {
			texts[i] = fmt.Sprintf("%g × %s", *r.Weight, r.Name)
		}
		if r.Required != nil && !*r.Required {
			texts[i] += " (optional)"
		}
		if r.GroupMin > 0 {
			texts[i] += fmt.Sprintf(" (of whole groups of at least %d)", r.GroupMin)
		}
	}
	return strings.Join(texts, ", ")
}

// listText says a list: equal neighbours once, with how many they are; a long list by its ends.
func listText(v reflect.Value) string {
	const most = 8
	var texts []string
	for i := 0; i < v.Len(); {
		k := i
		for k < v.Len() && v.Index(k).Equal(v.Index(i)) {
			k++
		}
		text := fmt.Sprint(v.Index(i).Interface())
		if k-i > 1 {
			text = fmt.Sprintf("%s × %d", text, k-i)
		}
		texts, i = append(texts, text), k
	}
	if len(texts) > most {
		return fmt.Sprintf("%d values, %s to %s", v.Len(), texts[0], texts[len(texts)-1])
	}
	return cmp.Or(strings.Join(texts, ", "), "none")
}

// list returns the settings by their parts.
func (t *tally) list() (list []Setting) {
	const most = 4
	for _, part := range parts {
		for _, name := range t.names {
			c := t.at[name]
			if c.Part != part {
				continue
			}
			s := c.Setting
			if s.Varies = len(c.values) > 1; !s.Varies {
				s.Value = c.values[0]
				list = append(list, s)
				continue
			}
			var texts []string
			for _, value := range c.values[:min(most, len(c.values))] {
				text := cut(value, 200)
				if len(c.values) <= most {
					text += fmt.Sprintf(" (%d)", c.times[value])
				}
				texts = append(texts, text)
			}
			if s.Value = strings.Join(texts, ", "); len(c.values) > most {
				s.Value = fmt.Sprintf("%d values: %s, …", len(c.values), s.Value)
			}
			list = append(list, s)
		}
	}
	return list
}

// differences returns the settings in which two runs differ. Of a run whose prompts and samples are gone none is known.
func (r *Reader) differences(ctx context.Context, a, b schemas.Run) ([]differing, error) {
	list, at := []differing{}, map[string]int{}
	for i, run := range []schemas.Run{a, b} {
		s, err := r.Settings(ctx, run)
		if errors.Is(err, bus.ErrNotFound) {
			return []differing{}, nil
		}
		if err != nil {
			return nil, err
		}
		for _, x := range s.List {
			k, there := at[x.Name]
			if !there {
				k, at[x.Name] = len(list), len(list)
				list = append(list, differing{Part: x.Part, Name: x.Name})
			}
			*[]*string{&list[k].A, &list[k].B}[i] = x.Value
		}
	}
	list = slices.DeleteFunc(list, func(d differing) bool { return d.A == d.B })
	slices.SortStableFunc(list, func(a, b differing) int {
		return cmp.Compare(slices.Index(parts, a.Part), slices.Index(parts, b.Part))
	})
	return list, nil
}
