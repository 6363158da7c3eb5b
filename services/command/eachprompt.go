package command

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// load reads the prompts of each into a list.
func (p *promptFlags) load(texts []string, stdin io.Reader, named bool) (list []prompt, err error) {
	for q, err := range p.each(texts, stdin, named) {
		if err != nil {
			return nil, err
		}
		list = append(list, *q)
	}
	return list, nil
}

// each reads the prompts of the command line and of the file, selects some, fills in the flags, and yields them. texts
// are the prompts of the command line. A uid from a file depends only on the prompt's position and text, so the same
// command asks for the same groups. With named this holds for the command line too; without it intake makes new uids.
// An error, which is a usage error, ends it.
func (p *promptFlags) each(texts []string, stdin io.Reader, named bool) iter.Seq2[*prompt, error] {
	return func(yield func(*prompt, error) bool) {
		err := p.yieldPrompts(texts, stdin, named, func(q *prompt) bool { return yield(q, nil) })
		if err != nil {
			yield(nil, usage(err))
		}
	}
}

// yieldPrompts is each, until yield returns false.
func (p *promptFlags) yieldPrompts(texts []string, stdin io.Reader, named bool, yield func(*prompt) bool) error {
	if formats := dataset.Formats(); !slices.Contains(formats, dataset.Format(p.Format)) {
		return oneOf("prompts-format", p.Format, wordsOf(formats))
	}
	choice, err := p.choiceOf()
	if err != nil {
		return err
	}
	p.conversation, texts, err = p.messagesOf(texts)
	if err != nil {
		return err
	}
	defaults, err := p.fieldsOfFlags()
	if err != nil {
		return err
	}
	defer p.states.close()
	specs, _ := defaults["reward"].([]any)
	if err := p.checkAllFlags(specs, defaults); err != nil {
		return err
	}
	adv, err := estimatorConfig(p.advantage)
	if err != nil {
		return err
	}
	batches := p.selectRecords(texts, stdin, specs, defaults, choice)
	if one := choice.BatchSize == 0 && p.joins(adv.NeedsBatch()); one || p.images != nil { // these need them all
		batches = wholeBatches(batches, one)
	}
	uids := map[[16]byte]int{}
	for batch, err := range batches {
		if err != nil {
			return err
		}
		out := make([]prompt, 0, len(batch.Records))
		for _, r := range batch.Records {
			q, err := p.newPrompt(&r, defaults, named || r.Index >= len(texts))
			if err != nil {
				return err
			}
			hash := sha256.Sum256([]byte(q.uid))
			uid := [16]byte(hash[:])
			if first, twice := uids[uid]; twice && q.uid != "" {
				return fmt.Errorf("prompts %d and %d have the same uid %q; a uid names one group of a run",
					first+1, r.Index+1, q.uid)
			}
			uids[uid] = r.Index
			out = append(out, q)
		}
		if err := p.joinToBatch(out, batch, adv.NeedsBatch()); err != nil {
			return err
		}
		for i := range out {
			if !yield(&out[i]) {
				return nil
			}
		}
	}
	return nil
}

// wholeBatches reads all batches before it yields the first; with one they are pieces of the same.
func wholeBatches(batches iter.Seq2[dataset.Batch, error], one bool) iter.Seq2[dataset.Batch, error] {
	return func(yield func(dataset.Batch, error) bool) {
		var all []dataset.Batch
		for b, err := range batches {
			switch {
			case err != nil:
				yield(b, err)
				return
			case one && len(all) > 0:
				all[0].Records = append(all[0].Records, b.Records...)
			default:
				all = append(all, b)
			}
		}
		for _, b := range all {
			if !yield(b, nil) {
				return
			}
		}
	}
}

// newPrompt makes the prompt of a record, with a readable uid if it is to be named and has none.
func (p *promptFlags) newPrompt(r *dataset.Record, defaults map[string]any, named bool) (prompt, error) {
	own := startOf(r.Fields)["latents"] != nil || startOf(r.Fields)["data"] != nil
	q := p.promptOf(r, defaults)
	if q.body["uid"] == nil && named {
		q.body["uid"] = fmt.Sprintf("%04d-%s", r.Index, slug(q.text))
	}
	uid, _ := q.body["uid"].(string)
	if r.Epoch > 0 && uid != "" { // a later pass over the prompts; the first is epoch 0
		uid = fmt.Sprintf("%s-e%d", uid, r.Epoch)
	}
	if uid != "" {
		q.body["uid"] = uid
	}
	q.uid = schemas.UID(uid)
	if err := errors.Join(p.states.setStart(q, own), p.images.setStart(q, own, r.Index, p.loaded.Records)); err != nil {
		return q, err
	}
	return q, p.setSubstitutes(&q, r)
}

// selectRecords reads the records of prompts and yields those that the flags choose, in batches. It counts the others
// in p.loaded. No prompt at all is an error.
func (p *promptFlags) selectRecords(
	texts []string, stdin io.Reader, specs []any, defaults map[string]any, choice dataset.Choice,
) iter.Seq2[dataset.Batch, error] {
	return func(yield func(dataset.Batch, error) bool) {
		p.anyName = p.fields.GivenValues()["unknown_fields"] == schemas.UnknownWarn
		prepare, err := p.prepare(specs, defaults)
		if err != nil {
			yield(dataset.Batch{}, err)
			return
		}
		given, err := p.givenRecords(texts, prepare)
		if err != nil {
			yield(dataset.Batch{}, err)
			return
		}
		reader, done, err := p.openFile(stdin, prepare)
		if err != nil {
			yield(dataset.Batch{}, fmt.Errorf("--prompts: %w", err))
			return
		}
		defer done()
		p.loaded.reader = reader
		n := 0
		for batch, err := range dataset.Choose(allRecords(given, reader), choice, &p.loaded.Report) {
			n++
			if _, ofFile := errors.AsType[*fileError](err); err != nil && !ofFile {
				err = errors.New(choiceFlags.nameFlags(err.Error()))
			}
			if !yield(batch, err) || err != nil {
				return
			}
		}
		if n == 0 {
			yield(dataset.Batch{}, p.noPrompts())
		}
	}
}

// fileError is an error of the file of prompts.
type fileError struct{ error }

// allRecords yields the records that are given, then those of the file, if there is one.
func allRecords(given []dataset.Record, file *dataset.Reader) iter.Seq2[dataset.Record, error] {
	return func(yield func(dataset.Record, error) bool) {
		for _, r := range given {
			if !yield(r, nil) {
				return
			}
		}
		if file == nil {
			return
		}
		for r, err := range file.Records() {
			if err != nil {
				err = &fileError{fmt.Errorf("--prompts: %w", err)}
			}
			r.Index += len(given)
			if !yield(r, err) {
				return
			}
		}
	}
}

// noPrompts says why no prompt is left.
func (p *promptFlags) noPrompts() error {
	switch l := &p.loaded; {
	case l.Records > 0:
		return fmt.Errorf("no prompts left of %d: %d after --offset and --limit", l.Records, l.Chosen)
	case p.File != "" && l.reader.Skipped > 0:
		return fmt.Errorf("--prompts: no prompts in %s, and %s", p.File, present.Count(l.reader.Skipped, "bad record"))
	case p.File != "":
		return fmt.Errorf("--prompts: no prompts in %s; must have at least one, a line or a record each", p.File)
	}
	return errors.New("no prompts; give them as arguments, or a file with --prompts")
}
